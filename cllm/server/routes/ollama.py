"""Ollama's routes: `/api/chat`, `/api/generate`, `/api/embed`, and those that describe the model.

Durations are in nanoseconds.  Streams are lines of JSON, and are the default.  `keep_alive` has no effect:
the server decides how long a model stays loaded.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field, create_model
from starlette.responses import JSONResponse, Response

from cllm import (
    Completion,
    FinishReason,
    ModelInfo,
    SamplingParams,
    TokenDelta,
    TokenStream,
)
from cllm.server.answers.answer import AnswerForm, answer
from cllm.server.answers.chat_call import (
    ChatCall,
    answer_chat,
    arguments_of,
    client_tools_of,
    hinted,
)
from cllm.server.answers.infill import Gap, prompt_of_gap
from cllm.server.bodies.fields import (
    MAX_SEED,
    NO_LIMIT,
    Flag,
    Integer,
    Messages,
    Number,
    Objects,
    Text,
    Texts,
    sampling_fields,
)
from cllm.server.bodies.schemas import HARMLESS, Body, Queued, lenient, sampling_of
from cllm.server.http.body import SafeRoute, parsed
from cllm.server.http.problems import Problem, invalid, problem_of
from cllm.server.http.replies import Event, Reply, Writer
from cllm.server.operation.pulls import Pulls
from cllm.server.routes.embeddings import N_NUMBERS_FEW, field_of_client, several_texts
from cllm.server.routes.info import LATEST
from cllm.server.routes.loras import loras_of
from cllm.server.state import (
    ServerState,
    counting_if_given_up,
    log_request,
    note_tokens,
    request_id_of,
    state_of,
)

router: APIRouter = APIRouter(prefix="/api", route_class=SafeRoute, tags=["Ollama"])

# Of Ollama, whose API this is.  Codex requires 0.13.4 for `/v1/responses`, which the server has.
VERSION = "0.14.0"
# Properties of a model that is not loaded.
UNLOADED: dict[str, Any] = {
    "modelfile": "", "parameters": "", "template": "", "details": {}, "model_info": {},
    "capabilities": ["completion"],
}  # fmt: skip
# The client's names of the engine's fields, for errors.
NAMES = {"max_tokens": "options.num_predict", "json_schema": "format"}
LOADING = dict.fromkeys(("total_duration", "load_duration"), 0)


class _OptionFields(Body):
    harmless: ClassVar[frozenset[str]] = HARMLESS | {
        "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "use_mmap",
        "use_mlock", "numa", "vocab_only", "f16_kv", "logits_all", "embedding_only", "penalize_newline",
        "tfs_z", "draft_num_predict",
    }  # fmt: skip

    num_predict: Integer | None = None


OllamaOptions: Any = create_model(
    "OllamaOptions",
    __base__=_OptionFields,
    **sampling_fields(without=("logprobs", "prompt_logprobs")),
)


class _OllamaFields(Queued):
    harmless: ClassVar[frozenset[str]] = HARMLESS | {"shift", "truncate"}
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "logprobs": (False,), "top_logprobs": (0,), "template": ("",), "context": ([],),
    }  # fmt: skip

    model: Text
    stream: Flag = True
    options: OllamaOptions | None = None
    timeout: Number | None = None

    @property
    def turn(self) -> dict[str, Any]:
        """See `Queued`."""
        return {**super().turn, "timeout": self.timeout}


class _AnswerFields(_OllamaFields):
    format: Text | dict[str, Any] | None = None
    think: Flag | Text | None = None


class OllamaChatBody(_AnswerFields):
    """`POST /api/chat`."""

    messages: Messages = Field(default_factory=list)
    tools: Objects | None = None


class OllamaGenerateBody(_AnswerFields):
    """`POST /api/generate`."""

    prompt: Text = ""
    suffix: Text = ""
    system: Text = ""
    raw: Flag = False
    images: Texts = Field(default_factory=list)


class OllamaEmbedBody(_OllamaFields):
    """`POST /api/embed`."""

    input: Text | Texts
    truncate: Flag = True
    dimensions: Integer | None = None


class OllamaEmbeddingsBody(_OllamaFields):
    """`POST /api/embeddings`."""

    prompt: Text = ""


class OllamaPullBody(Body):
    """`POST /api/pull`."""

    harmless: ClassVar[frozenset[str]] = HARMLESS | {"insecure"}

    model: Text | None = None
    name: Text | None = None
    stream: Flag = True


class OllamaShowBody(Body):
    """`POST /api/show`."""

    harmless: ClassVar[frozenset[str]] = HARMLESS | {"verbose", "system", "template", "options"}

    model: Text | None = None
    name: Text | None = None


def unload_answer(path: str, body: bytes) -> dict[str, Any] | None:
    """Return the answer to a request that only unloads its model, which is not loaded; None for another request."""
    if path not in ("/api/chat", "/api/generate") or not isinstance(value := parsed(body), dict):
        return None
    has_input = any(value.get(name) for name in ("messages", "prompt", "images"))
    if has_input or value.get("keep_alive") not in (0, "0", "0s"):
        return None
    return OllamaForm(str(value.get("model")), is_chat=path == "/api/chat").loaded("unload")


# --- Answers ---------------------------------------------------------------------------------
@router.post("/chat", summary="Answer a chat, as Ollama does")
async def chat(body: OllamaChatBody, request: Request) -> Response:
    """Answer a chat; without messages, say that the model is loaded."""
    state, request_id = state_of(request), request_id_of(request)
    form = OllamaForm(body.model, is_chat=True)
    state.serving  # noqa: B018  # raises an error if there is no model
    if not body.messages:
        return JSONResponse(form.loaded())
    tools = client_tools_of(body.tools)
    options = {"tools": tools.choice(None)[0], **_thinking(body.think)}
    state.check_messages(len(body.messages))
    call = await _call(state, body, _messages(body.messages), options)
    call = replace(call, tools=tools)
    log_request(state, request_id, body.messages)
    observation = state.observation(request, "chat", call.params)
    return answer_chat(state, call, form, observation, request_id, is_streamed=body.stream)


@router.post("/generate", summary="Complete a prompt, as Ollama does")
async def generate(body: OllamaGenerateBody, request: Request) -> Response:
    """Answer a prompt as a chat of one message; with `raw` or `suffix`, continue it or fill in text.

    Without a prompt, say that the model is loaded.
    """
    state, request_id = state_of(request), request_id_of(request)
    engine = state.serving
    form = OllamaForm(body.model, is_chat=False)
    if not (body.prompt or body.images):
        return JSONResponse(form.loaded())
    log_request(state, request_id, body.prompt)
    if not (body.raw or body.suffix) and engine.model.chat_template is not None:
        message = {"role": "user", "content": body.prompt, "images": body.images}
        system = [{"role": "system", "content": body.system}] if body.system else []
        call = await _call(state, body, _messages([*system, message]), _thinking(body.think))
        observation = state.observation(request, "text_completion", call.params)
        return answer_chat(state, call, form, observation, request_id, is_streamed=body.stream)
    if body.images:
        raise invalid("images", "are for a model with a chat template, and not for raw or suffix")
    prompt = await _filled(state, body) if body.suffix else body.prompt
    params = _params(state, body)
    lora = loras_of(engine, None, body.model.removesuffix(LATEST))

    def open_streams(engine_id: str) -> list[TokenStream]:
        return [
            engine.stream(
                prompt, params, lora=lora, parse_special=True, request_id=engine_id, **body.turn
            )
        ]

    observation = state.observation(request, "text_completion", params)
    problem = partial(problem_of, name_of=lambda name: NAMES.get(name, name))
    return answer(
        state, form, open_streams, observation, request_id, is_streamed=body.stream, problem=problem
    )


async def _filled(state: ServerState, body: OllamaGenerateBody) -> Any:
    engine = state.serving
    if (fim := engine.model.fim) is None:
        raise Problem(400, f"{body.model!r} does not support insert", param="suffix")
    async with state.tokenizer_turn():
        return await prompt_of_gap(engine, fim, Gap(body.prompt, body.suffix))


async def _call(
    state: ServerState, body: _AnswerFields, messages: list[Any], options: dict[str, Any]
) -> ChatCall:
    engine = state.serving
    scheduling = {**body.turn, "lora": loras_of(engine, None, body.model.removesuffix(LATEST))}
    call = ChatCall(
        messages,
        await hinted(engine, options),
        _params(state, body),
        scheduling,
        names={**NAMES, "reasoning_effort": "think"},
    )
    return await call.with_images(state.fetcher)


def _params(state: ServerState, body: _AnswerFields) -> SamplingParams:
    changes: dict[str, Any] = {}
    n_max = None if body.options is None else body.options.num_predict
    if n_max is not None:
        changes["max_tokens"] = n_max if n_max > 0 else NO_LIMIT
    if body.format == "json":
        changes["json_schema"] = lenient({"type": "object"})
    elif isinstance(body.format, dict):
        changes["json_schema"] = lenient(body.format)
    elif body.format:
        raise invalid("format", 'must be "json" or a schema')
    given = OllamaOptions() if body.options is None else body.options
    if given.seed is not None:  # Ollama's may be negative, or have 64 bits
        changes["seed"] = None if given.seed < 0 else given.seed % (MAX_SEED + 1)
    return sampling_of(
        given,
        state.serving.sampling_defaults,
        lambda name: NAMES.get(name, f"options.{name}"),
        **changes,
    )


def _thinking(think: bool | str | None) -> dict[str, Any]:
    """Return the options of a chat for a `think`: a switch, or an effort."""
    if isinstance(think, bool):
        return {"chat_template_kwargs": {"enable_thinking": think}}
    return {"reasoning_effort": think or None}


def _messages(given: Sequence[Any]) -> list[Any]:
    """Return the messages in OpenAI's form.

    A result belongs to the call with its `tool_call_id`, or else to the first open call of the tool that it
    names, or else to the first open call.  Calls are open until the next message with calls.
    """
    messages: list[Any] = []
    open_calls = _OpenCalls(())
    for i, message in enumerate(given):
        if not isinstance(message, Mapping):
            messages.append(message)  # the engine rejects it
            continue
        said = {k: v for k, v in message.items() if k in ("role", "content", "name")}
        if message.get("images"):
            said["content"] = _with_images(f"messages[{i}]", message)
        if message.get("thinking"):
            said["reasoning_content"] = message["thinking"]
        if calls := message.get("tool_calls"):
            said["tool_calls"] = _calls(f"messages[{i}].tool_calls", calls, len(messages))
            open_calls = _OpenCalls(said["tool_calls"])
        elif message.get("role") == "tool":
            name = message.get("tool_name", message.get("name"))
            found = open_calls.take(message.get("tool_call_id"), name)
            said.update({} if found is None else {"tool_call_id": found})
        messages.append(said)
    return messages


class _OpenCalls:
    """The calls of a message whose results have not come; each result takes a constant time."""

    def __init__(self, calls: Sequence[Mapping[str, Any]]) -> None:
        self._ids: dict[int, str] = {n: call["id"] for n, call in enumerate(calls)}
        self._numbers: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
        for n, call in enumerate(calls):
            for key in self._keys(call["id"], call["function"].get("name")):
                self._numbers[key].append(n)

    def take(self, wanted: object, name: object) -> str | None:
        """Remove and return the id of the call that a result belongs to; None if no call is open."""
        for key in self._keys(wanted, name):
            numbers = self._numbers[key]
            while numbers:
                if (found := self._ids.pop(numbers.popleft(), None)) is not None:
                    return found
        return None

    @staticmethod
    def _keys(wanted: object, name: object) -> list[tuple[str, str]]:
        """Return the ways to find a call: its id, its tool, its place."""
        given = (("id", wanted), ("name", name), ("place", ""))
        return [(kind, value) for kind, value in given if isinstance(value, str)]


def _with_images(field: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    images = message["images"]
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise invalid(f"{field}.images", "must be a list of images in base64")
    parts = [{"type": "image", "source": {"type": "base64", "data": image}} for image in images]
    return [*parts, {"type": "text", "text": message.get("content") or ""}]


def _calls(field: str, calls: object, number: int) -> list[dict[str, Any]]:
    made = []
    for k, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise invalid(f"{field}[{k}].function", "must be an object")
        wanted = {name: function[name] for name in ("name", "arguments") if name in function}
        given = call.get("id")
        name = given if isinstance(given, str) and given else f"call_{number}_{k}"
        made.append({"id": name, "type": "function", "function": wanted})
    return made


class OllamaForm(AnswerForm):
    """Form of the answers of `/api/chat` and `/api/generate`."""

    prompt_field = "messages"
    has_lines = True

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model = model
        self._is_chat = is_chat

    def loaded(self, reason: str = "load") -> dict[str, Any]:
        """Return the answer to a request without a prompt."""
        return self._chunk("", done=True, done_reason=reason)

    def ping(self) -> Event:
        """See `AnswerForm`."""
        return None, self._chunk("")

    def events(self, index: int, delta: TokenDelta) -> Iterator[Event]:
        """See `AnswerForm`."""
        if delta.text or delta.reasoning:
            yield None, self._chunk(delta.text, delta.reasoning)

    def end(self, done: Sequence[Completion]) -> Iterator[Event]:
        """See `AnswerForm`."""
        if done[0].tool_calls:
            yield None, self._chunk("", calls=done[0])
        yield None, self._chunk("", **_account(done[0]))

    def failed(self, problem: Problem) -> Iterator[Event]:
        """See `AnswerForm`."""
        yield None, {"error": str(problem)}

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """See `AnswerForm`."""
        (one,) = done
        return self._chunk(one.text, one.reasoning, one, **_account(one))

    def _chunk(
        self, text: str, thinking: str = "", calls: Completion | None = None, **fields: Any
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls is not None and calls.tool_calls:
            said["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {
                        "index": i,
                        "name": call.name,
                        "arguments": arguments_of(call.arguments),
                    },
                }
                for i, call in enumerate(calls.tool_calls)
            ]
        if self._is_chat:
            said = {"message": {"role": "assistant", "content": text, **said}}
        else:
            said = {"response": text, **said}
        return {"model": self._model, "created_at": _now(), **said, **({"done": False} | fields)}


def _account(done: Completion) -> dict[str, Any]:
    """Return the reason of the end, and tokens and times of an answer."""
    timings, usage = done.timings, done.usage
    has_ended = done.finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
    return {
        "done": True,
        "done_reason": "stop" if has_ended else "length",
        "total_duration": _ns(timings.total_s),
        "load_duration": 0,
        "prompt_eval_count": usage.n_prompt,
        "prompt_eval_duration": _ns(timings.prefill_s),
        "eval_count": usage.n_output,
        "eval_duration": _ns(timings.decode_s),
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


# --- Vectors ---------------------------------------------------------------------------------
@router.post("/embed", summary="The vectors of texts, as Ollama has it")
async def embed(body: OllamaEmbedBody, request: Request) -> Response:
    """Return one vector of length 1 for each text; without texts, say that the model is loaded."""
    state = state_of(request)
    if not body.input:
        state.serving  # noqa: B018  # raises an error if there is no model
        return JSONResponse({"model": body.model, "embeddings": [], **LOADING})
    texts = several_texts(state, request, "input", body.input)

    async def produce(writer: Writer) -> None:
        with counting_if_given_up(request, texts), field_of_client("input"):
            found = await state.serving.embeddings(
                texts,
                dimensions=body.dimensions,
                truncate=body.truncate,
                timeout=body.timeout,
                priority=body.priority,
            )
        note_tokens(request, sum(found.n_tokens))

        def told() -> dict[str, Any]:
            return {
                "model": body.model,
                "embeddings": found.vectors.tolist(),
                **LOADING,
                "prompt_eval_count": sum(found.n_tokens),
            }

        await writer.json(told, is_long=found.vectors.size > N_NUMBERS_FEW)

    return Reply(produce)


@router.post("/embeddings", summary="The vector of a text, as Ollama had it")
async def embeddings(body: OllamaEmbeddingsBody, request: Request) -> Response:
    """Return the vector of one text; empty for an empty text."""
    state = state_of(request)
    log_request(state, request_id_of(request), body.prompt)

    async def produce(writer: Writer) -> None:
        vector: list[float] = []
        if body.prompt:
            with counting_if_given_up(request, [body.prompt]):
                found = await state.serving.embeddings(
                    [body.prompt], timeout=body.timeout, priority=body.priority, truncate=True
                )
            note_tokens(request, sum(found.n_tokens))
            vector = found.vectors[0].tolist()
        await writer.json(lambda: {"embedding": vector})

    return Reply(produce)


# --- The model -------------------------------------------------------------------------------
@router.get("/version", summary="The version of Ollama's API")
async def version() -> dict[str, str]:
    """Return the version of Ollama whose API this is."""
    return {"version": VERSION}


@router.get("/tags", summary="The models, as Ollama lists them")
async def tags(request: Request) -> dict[str, Any]:
    """Return the model in a list."""
    state = state_of(request)
    return {"models": [listed(state.model_name, state.serving.model)]}


@router.get("/ps", summary="The loaded models, as Ollama lists them")
async def ps(request: Request) -> dict[str, Any]:
    """Return the model in a list."""
    state = state_of(request)
    return {"models": [running(state.model_name, state.serving.model)]}


@router.post("/pull", summary="Download a model, as Ollama does")
async def pull(body: OllamaPullBody, request: Request) -> Response:
    """Download a model of the hub.  The middleware `Limits` has checked the admin key."""
    return pulled(state_of(request).pulls, body)


@router.delete("/pull", summary="Cancel the present download")
async def cancel_pull(request: Request) -> dict[str, str]:
    """Cancel the download; the part that is here is kept."""
    return state_of(request).pulls.cancel()


def pulled(pulls: Pulls, body: OllamaPullBody) -> Response:
    """Return the answer to `/api/pull`: lines with the progress, or one line at the end."""
    if (name := body.model or body.name) is None:
        raise invalid("model", "missing")

    async def produce(writer: Writer) -> None:
        report: dict[str, Any] = {}
        async for report in pulls.reports(name):
            if body.stream:
                await writer.events([(None, report)])
        if body.stream:
            await writer.end([])
        else:
            last = report
            await writer.json(lambda: last)

    return Reply(produce, has_lines=True)


@router.post("/show", summary="The properties of the model, as Ollama has them")
async def show(body: OllamaShowBody, request: Request) -> dict[str, Any]:
    """Return the chat template, the abilities and the sizes of the model."""
    engine = state_of(request).serving
    model = engine.model
    abilities = await engine.template_abilities() if model.chat_template is not None else None
    has = {
        "completion": model.generates,
        "embedding": not model.generates,
        "insert": model.fim is not None,
        "vision": "image" in model.modalities,
        "audio": "audio" in model.modalities,
        "tools": abilities is not None and abilities.tools,
        "thinking": abilities is not None and abilities.thinking,
    }
    defaults = "\n".join(f"{name} {value}" for name, value in engine.sampling_defaults.items())
    return {
        "modelfile": f"FROM {model.path}",
        "parameters": defaults,
        "template": model.chat_template or "",
        "details": _details(model),
        "model_info": {
            "general.architecture": model.architecture,
            "general.basename": model.name,
            "general.parameter_count": model.n_params,
            f"{model.architecture}.block_count": model.n_layer,
            f"{model.architecture}.context_length": model.n_ctx,
            f"{model.architecture}.embedding_length": model.n_embd,
            f"{model.architecture}.vocab_size": model.n_vocab,
        },
        "capabilities": [name for name, is_there in has.items() if is_there],
        "modified_at": _modified_at(model.path),
    }


def listed(name: str, model: ModelInfo) -> dict[str, Any]:
    """Return a model as `/api/tags` lists it."""
    return {
        "name": name,
        "model": name,
        "modified_at": _modified_at(model.path),
        "size": model.size_bytes,
        "digest": sha256(model.state_key.encode()).hexdigest(),
        "details": _details(model),
    }


def running(name: str, model: ModelInfo) -> dict[str, Any]:
    """Return a loaded model as `/api/ps` lists it."""
    told = listed(name, model)
    del told["modified_at"]
    size = {"size_vram": model.size_bytes if model.devices else 0, "context_length": model.n_ctx}
    return {**told, "expires_at": "2300-01-01T00:00:00Z", **size}


def _details(model: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": model.architecture,
        "families": [model.architecture],
        "parameter_size": f"{model.n_params / 1e9:.2f}B"
        if model.n_params >= 1e9
        else f"{model.n_params / 1e6:.2f}M",
        "quantization_level": _quantization(model),
    }


def _quantization(model: ModelInfo) -> str:
    """Return the type of the weights: the end of llama.cpp's description, as in "qwen3 0.6B Q4_K - Medium"."""
    return model.description.partition(f"{model.architecture} ")[2].partition(" ")[2] or "unknown"


def _modified_at(path: str) -> str:
    try:
        seconds = Path(path).stat().st_mtime
    except OSError:  # the file was removed after it was loaded
        seconds = 0.0
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
