"""libllama as Python objects; knows no engine and no event loop.

Usable on its own: `Model`, `Context`, `Batch`, `SamplerChain`.  Every argument that would make
libllama abort, hang or lie is refused with a typed error before the call.
"""

from cllm.bindings._handle import NativeHandle, fork_generation
from cllm.bindings._library import find_library, library
from cllm.bindings.batch import Batch, Run
from cllm.bindings.context import Context, Logits, system_info
from cllm.bindings.embedding_context import EmbeddingContext
from cllm.bindings.lora import LoraAdapter
from cllm.bindings.memory_needs import MemoryNeeds, memory_needs
from cllm.bindings.model import Model
from cllm.bindings.quantization import quantize
from cllm.bindings.sampler import CandidateMemory, Candidates, SamplerChain
from cllm.bindings.vocabulary import Vocabulary

__all__ = (
    "Batch",
    "CandidateMemory",
    "Candidates",
    "Context",
    "EmbeddingContext",
    "Logits",
    "LoraAdapter",
    "MemoryNeeds",
    "Model",
    "NativeHandle",
    "Run",
    "SamplerChain",
    "Vocabulary",
    "find_library",
    "fork_generation",
    "library",
    "memory_needs",
    "quantize",
    "system_info",
)
