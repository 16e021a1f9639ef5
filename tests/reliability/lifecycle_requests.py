"""Requests of the cases of `lifecycle`, and functions that tell how they end."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from cllm import CllmError, Engine, SamplingParams, SavedGeneration
from cllm.engine.loop.channel import Continuation
from cllm.engine.loop.request_call import RequestCall
from tests.conftest import QUIET

# Set by `lifecycle --over-process`.
OVER_PROCESS = "CLLM_LIFECYCLE_OVER_PROCESS"
OPTIONS: dict[str, Any] = {
    "n_ctx": 2048, "n_seq_max": 8, "pooling": "mean", "process": OVER_PROCESS in os.environ, **QUIET,
}  # fmt: skip
LONG = "count:100..299"
SHORT = "count:100..129"
GREEDY = SamplingParams(temperature=0.0)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=100_000, ignore_eos=True)
SCHEMA = {"type": "object", "properties": {c: {"type": "integer"} for c in "abcdef"}}
CHAT = [{"role": "user", "content": "1+1="}]
SAVED = SavedGeneration(
    RequestCall("1+1=", GREEDY, priority=0, timeout=None, request_id="saved"),
    Continuation((97,)),
    {},
    "",
)
LIMIT_S = 20.0
N_STREAMS = 8

# Every method of a served engine that needs the engine to serve.
METHODS: dict[str, Callable[[Engine], Any]] = {
    "stream": lambda engine: engine.stream("1+1="),
    "stream_chat": lambda engine: engine.stream_chat(CHAT),
    "resume": lambda engine: engine.resume(SAVED),
    "generate": lambda engine: engine.generate("1+1="),
    "generate_all": lambda engine: engine.generate_all(["1+1="]),
    "chat": lambda engine: engine.chat(CHAT),
    "render_chat": lambda engine: engine.render_chat(CHAT),
    "template_abilities": lambda engine: engine.template_abilities(),
    "embed": lambda engine: engine.embed(["1+1="]),
    "embeddings": lambda engine: engine.embeddings(["1+1="]),
    "rerank": lambda engine: engine.rerank("1+1=", ["2"], template="{query} {document}"),
    "classify": lambda engine: engine.classify(["1+1="]),
    "load_lora": lambda engine: engine.load_lora("a", "a.gguf"),
    "unload_lora": lambda engine: engine.unload_lora("a"),
    "erase_slot": lambda engine: engine.erase_slot(0),
    "score": lambda engine: engine.score("1+1=", "2"),
    "tokenize": lambda engine: engine.tokenize("1+1="),
    "detokenize": lambda engine: engine.detokenize([97]),
    "pieces": lambda engine: engine.pieces([97]),
    "drain": lambda engine: engine.drain(),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "slots": lambda engine: engine.slots(),
    "live_view": lambda engine: engine.live_view(),
    "reload": lambda engine: engine.reload(),
    "audit": lambda engine: engine.audit(),
    "__aenter__": lambda engine: engine.__aenter__(),
    "start": lambda engine: engine.start(),
}


async def error_of(call: Callable[[Engine], Any], engine: Engine) -> type[BaseException] | None:
    """Return the type of the exception that a method raises; None if it raises nothing."""
    try:
        with anyio.fail_after(LIMIT_S):
            result = call(engine)
            if isinstance(result, Awaitable):
                await result
    except BaseException as error:
        return type(error)
    return None


async def ends(call: Callable[[], Awaitable[Any]], into: list[str]) -> None:
    """Make a request, and add its finish reason, or the name of its error, to `into`."""
    try:
        into.append(str((await call()).finish_reason))
    except CllmError as error:
        into.append(type(error).__name__)
