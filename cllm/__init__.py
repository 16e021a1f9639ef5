"""One llama.cpp model as a first-class citizen of an asyncio or trio program.

    async with cllm.Engine("model.gguf") as engine:
        completion = await engine.generate("1+1=", max_tokens=8, temperature=0)

`cllm.bindings` has libllama as Python objects; `cllm.errors` has the tree of exceptions.
"""

from cllm.engine.chat.template_abilities import TemplateAbilities
from cllm.engine.config import EngineConfig, EngineOptions
from cllm.engine.core.messages import ExtentInfo, LiveView, SlotInfo, SlotState, TickInfo
from cllm.engine.core.statistics import EngineStatistics, TickTimes
from cllm.engine.engine import Engine
from cllm.engine.health import EngineStatus, Health, Restart
from cllm.engine.loop.request_call import ChatPromptOptions
from cllm.engine.loop.stream import TokenStream
from cllm.engine.request import (
    Completion,
    FinishReason,
    ModelInfo,
    RenderedPrompt,
    Score,
    Timings,
    TokenDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from cllm.engine.sampling_params import SamplingOptions, SamplingParams
from cllm.errors import (
    CllmError,
    ClosedError,
    DownloadError,
    EngineFailedError,
    GenerationError,
    InvalidArgumentError,
    InvalidRequestError,
    LibraryError,
    ModelLoadError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)

__version__ = "0.1.0"  # that of pyproject.toml; a test compares them

__all__ = (
    "ChatPromptOptions",
    "CllmError",
    "ClosedError",
    "Completion",
    "DownloadError",
    "Engine",
    "EngineConfig",
    "EngineFailedError",
    "EngineOptions",
    "EngineStatistics",
    "EngineStatus",
    "ExtentInfo",
    "FinishReason",
    "GenerationError",
    "Health",
    "InvalidArgumentError",
    "InvalidRequestError",
    "LibraryError",
    "LiveView",
    "ModelInfo",
    "ModelLoadError",
    "PromptTooLongError",
    "QueueFullError",
    "RenderedPrompt",
    "RequestError",
    "Restart",
    "SamplingOptions",
    "SamplingParams",
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
)
