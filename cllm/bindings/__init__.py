"""Python objects for libllama, independent of the engine and of any event loop.

The main classes are `Model`, `Context`, `Batch` and `SamplerChain`.  An argument that would make
libllama abort, hang or return wrong results raises a typed error before the call.
"""

from cllm.bindings._handle import NativeHandle, fork_generation
from cllm.bindings._library import find_library, library
from cllm.bindings.batch import Batch, Run
from cllm.bindings.context import Context, Logits, system_info
from cllm.bindings.devices import Device, Placement, devices
from cllm.bindings.embedding_batch import EmbeddingBatch
from cllm.bindings.embedding_context import EmbeddingContext
from cllm.bindings.lora import LoraAdapter
from cllm.bindings.memory_needs import MemoryNeeds, memory_needs
from cllm.bindings.model import Model
from cllm.bindings.mtp_context import MtpContext, MtpRows
from cllm.bindings.projector import MediaChunk, Projector
from cllm.bindings.quantization import quantize
from cllm.bindings.sampler import CandidateMemory, Candidates, DrySampler, SamplerChain
from cllm.bindings.vocabulary import Vocabulary

__all__ = (
    "Batch",
    "CandidateMemory",
    "Candidates",
    "Context",
    "Device",
    "DrySampler",
    "EmbeddingBatch",
    "EmbeddingContext",
    "Logits",
    "LoraAdapter",
    "MediaChunk",
    "MemoryNeeds",
    "Model",
    "MtpContext",
    "MtpRows",
    "NativeHandle",
    "Placement",
    "Projector",
    "Run",
    "SamplerChain",
    "Vocabulary",
    "devices",
    "find_library",
    "fork_generation",
    "library",
    "memory_needs",
    "quantize",
    "system_info",
)
