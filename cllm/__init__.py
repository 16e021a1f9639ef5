"""One llama.cpp model as a first-class citizen of an asyncio or trio program.

    async with cllm.Engine("model.gguf") as engine:
        completion = await engine.generate("1+1=", max_tokens=8, temperature=0)

`cllm.bindings` has libllama as Python objects; `cllm.errors` has the tree of exceptions.

Each name is imported on its first use.  Importing all of them takes half a second, and a command line or the
process of an engine needs few.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cllm.engine.audio import Audio
    from cllm.engine.chat.template_abilities import TemplateAbilities
    from cllm.engine.config import EngineConfig, EngineOptions
    from cllm.engine.core.commands import ExtentInfo, LiveView, SlotInfo, SlotState, TickInfo
    from cllm.engine.core.statistics import EngineStatistics, TickTimes
    from cllm.engine.embedder import Embedder
    from cllm.engine.embedding import Classification, EmbeddingInfo, Embeddings, Ranked
    from cllm.engine.engine import Engine
    from cllm.engine.health import EngineStatus, Health, Restart
    from cllm.engine.image import Image
    from cllm.engine.loop.request_call import ChatPromptOptions
    from cllm.engine.loop.saved_generation import SavedGeneration
    from cllm.engine.loop.stream import TokenStream
    from cllm.engine.lora import LoraInfo
    from cllm.engine.output import (
        Completion,
        FinishReason,
        Timings,
        TokenDelta,
        TokenLogprob,
        ToolCall,
        ToolCallDelta,
        Usage,
    )
    from cllm.engine.request import FimTokens, ModelInfo, RenderedPrompt, Score
    from cllm.engine.sampling_params import SamplingOptions, SamplingParams
    from cllm.errors import (
        CllmError,
        ClosedError,
        DeadlineError,
        DownloadError,
        EmbeddingError,
        EngineFailedError,
        GenerationError,
        InvalidArgumentError,
        InvalidRequestError,
        LibraryError,
        MissingExtraError,
        ModelChangedError,
        ModelLoadError,
        PromptTooLongError,
        QueueFullError,
        RequestError,
        RpcServerError,
        WrongProcessError,
        WrongThreadError,
    )

__version__ = "0.1.0"  # the version in pyproject.toml; a test compares them

__all__ = (
    "Audio",
    "ChatPromptOptions",
    "Classification",
    "CllmError",
    "ClosedError",
    "Completion",
    "DeadlineError",
    "DownloadError",
    "Embedder",
    "EmbeddingError",
    "EmbeddingInfo",
    "Embeddings",
    "Engine",
    "EngineConfig",
    "EngineFailedError",
    "EngineOptions",
    "EngineStatistics",
    "EngineStatus",
    "ExtentInfo",
    "FimTokens",
    "FinishReason",
    "GenerationError",
    "Health",
    "Image",
    "InvalidArgumentError",
    "InvalidRequestError",
    "LibraryError",
    "LiveView",
    "LoraInfo",
    "MissingExtraError",
    "ModelChangedError",
    "ModelInfo",
    "ModelLoadError",
    "PromptTooLongError",
    "QueueFullError",
    "Ranked",
    "RenderedPrompt",
    "RequestError",
    "Restart",
    "RpcServerError",
    "SamplingOptions",
    "SamplingParams",
    "SavedGeneration",
    "Score",
    "SlotInfo",
    "SlotState",
    "TemplateAbilities",
    "TickInfo",
    "TickTimes",
    "Timings",
    "TokenDelta",
    "TokenLogprob",
    "TokenStream",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "WrongProcessError",
    "WrongThreadError",
)

_SUBMODULES = ("bindings", "engine", "errors", "sync")
_MODULE_OF = {
    "ChatPromptOptions": "cllm.engine.loop.request_call",
    "Classification": "cllm.engine.embedding",
    "CllmError": "cllm.errors",
    "ClosedError": "cllm.errors",
    "Completion": "cllm.engine.output",
    "DeadlineError": "cllm.errors",
    "DownloadError": "cllm.errors",
    "Embedder": "cllm.engine.embedder",
    "EmbeddingError": "cllm.errors",
    "EmbeddingInfo": "cllm.engine.embedding",
    "Embeddings": "cllm.engine.embedding",
    "Engine": "cllm.engine.engine",
    "EngineConfig": "cllm.engine.config",
    "EngineFailedError": "cllm.errors",
    "EngineOptions": "cllm.engine.config",
    "EngineStatistics": "cllm.engine.core.statistics",
    "EngineStatus": "cllm.engine.health",
    "ExtentInfo": "cllm.engine.core.commands",
    "FimTokens": "cllm.engine.request",
    "FinishReason": "cllm.engine.output",
    "GenerationError": "cllm.errors",
    "Health": "cllm.engine.health",
    "Image": "cllm.engine.image",
    "Audio": "cllm.engine.audio",
    "InvalidArgumentError": "cllm.errors",
    "InvalidRequestError": "cllm.errors",
    "LibraryError": "cllm.errors",
    "LiveView": "cllm.engine.core.commands",
    "LoraInfo": "cllm.engine.lora",
    "MissingExtraError": "cllm.errors",
    "ModelInfo": "cllm.engine.request",
    "ModelChangedError": "cllm.errors",
    "ModelLoadError": "cllm.errors",
    "PromptTooLongError": "cllm.errors",
    "QueueFullError": "cllm.errors",
    "Ranked": "cllm.engine.embedding",
    "RenderedPrompt": "cllm.engine.request",
    "RequestError": "cllm.errors",
    "RpcServerError": "cllm.errors",
    "Restart": "cllm.engine.health",
    "SamplingOptions": "cllm.engine.sampling_params",
    "SamplingParams": "cllm.engine.sampling_params",
    "SavedGeneration": "cllm.engine.loop.saved_generation",
    "Score": "cllm.engine.request",
    "SlotInfo": "cllm.engine.core.commands",
    "SlotState": "cllm.engine.core.commands",
    "TemplateAbilities": "cllm.engine.chat.template_abilities",
    "TickInfo": "cllm.engine.core.commands",
    "TickTimes": "cllm.engine.core.statistics",
    "Timings": "cllm.engine.output",
    "TokenDelta": "cllm.engine.output",
    "TokenLogprob": "cllm.engine.output",
    "TokenStream": "cllm.engine.loop.stream",
    "ToolCall": "cllm.engine.output",
    "ToolCallDelta": "cllm.engine.output",
    "Usage": "cllm.engine.output",
    "WrongProcessError": "cllm.errors",
    "WrongThreadError": "cllm.errors",
}


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(f"cllm.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'cllm' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
