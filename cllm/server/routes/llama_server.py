"""llama-server's own routes for text: `POST /completion` and `POST /infill`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.responses import Response

from cllm import (
    Audio,
    Completion,
    Engine,
    FinishReason,
    Image,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
    TokenStream,
)
from cllm.checks import check_lengths
from cllm.server.answers.answer import AnswerForm, answer
from cllm.server.answers.formats import deadline_of
from cllm.server.answers.infill import Gap, prompt_of_gap
from cllm.server.answers.running import check_in_time
from cllm.server.bodies.fields import MAX_SEED, MEDIA_MARKER, NO_LIMIT, SAMPLING_FIELDS
from cllm.server.bodies.schemas import (
    InfillBody,
    LlamaServerCompletionBody,
    LlamaServerFields,
    sampling_of,
)
from cllm.server.http.body import SafeRoute
from cllm.server.http.problems import Problem, invalid, shutting_down
from cllm.server.http.replies import Event
from cllm.server.routes.generate import check_length, check_logprobs
from cllm.server.routes.loras import loras_of
from cllm.server.state import ServerState, log_request, request_id_of, state_of

router: APIRouter = APIRouter(route_class=SafeRoute, tags=["llama-server"])
logger: logging.Logger = logging.getLogger("cllm.server")

Prompt = str | Sequence[int | str | Image | Audio]
OTHER_NAMES = {"typical_p": "typ_p"}  # of samplers
N_INFILL = 128  # tokens that the prompt leaves for the output; fewer for a smaller `n_predict`
NO_SLOT = -1
MAX_PATH = 8  # slashes that are looked at in one of `response_fields`; no field is as deep


@router.post("/completion", summary="Complete prompts, as llama-server does")
async def completion(body: LlamaServerCompletionBody, request: Request) -> Response:
    """Return the output of one prompt as an object, or those of several prompts as a list."""
    state = state_of(request)
    n = _n_of(state, body, len(body.prompt))
    prompts = [await _prompt_of(state, given) for given in body.prompt]
    return _answer(state, body, prompts, n, request)


@router.post("/infill", summary="Fill in text, as llama-server does")
async def infill(body: InfillBody, request: Request) -> Response:
    """Generate the text between a prefix and a suffix; status 501 if the model has no infill tokens."""
    state = state_of(request)
    engine = state.serving
    if (fim := engine.model.fim) is None:
        missing = (
            "Infill is not supported by this model: it has no prefix, suffix and middle tokens"
        )
        raise Problem(501, missing)
    n_output = N_INFILL if body.n_predict is None else min(body.n_predict, N_INFILL)
    gap = Gap(body.input_prefix, body.input_suffix, _others(body.input_extra), body.prompt)
    n = _n_of(state, body, 1)
    async with state.tokenizer_turn():
        prompt = await prompt_of_gap(engine, fim, gap, n_output)
    return _answer(state, body, [prompt], n, request)


def _others(extra: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for i, chunk in enumerate(extra):
        given = {"filename": "tmp", "text": None, **chunk}
        for key in ("filename", "text"):
            if not isinstance(given[key], str):
                raise invalid(f"input_extra[{i}].{key}", "must be text")
        found.append((str(given["filename"]), str(given["text"])))
    return found


async def _prompt_of(state: ServerState, given: Prompt) -> Prompt:
    """Return a prompt for the engine; texts between token ids are tokenized."""
    engine = state.serving
    check_length(engine, given)  # type: ignore[arg-type]  # a text has a token or more
    if isinstance(given, str) or any(isinstance(part, Image | Audio) for part in given):
        return given
    if not any(isinstance(part, str) for part in given):
        return given
    check_lengths([part for part in given if isinstance(part, str)], engine.model.n_ctx, "prompt")
    tokens: list[int] = []
    async with state.tokenizer_turn():
        for i, part in enumerate(given):
            if isinstance(part, str):
                tokens += await engine.tokenize(part, add_special=i == 0, parse_special=True)
            else:
                tokens.append(cast(int, part))
    return tokens


def _n_max(body: Any) -> int | None:
    """Return the limit of output tokens that a body states; 0 if only its prompt is computed."""
    limit: int | None = body.max_tokens if body.n_predict is None else body.n_predict
    return limit


def _params_of(body: Any, engine: Engine) -> SamplingParams:
    """Return the sampling parameters of a body; without a limit, an output may fill the context."""
    n_max = _n_max(body)
    changes: dict[str, Any] = {"max_tokens": NO_LIMIT if n_max is None else max(1, n_max)}
    if body.n_probs:
        changes["logprobs"] = body.n_probs
    if body.temperature is not None:
        changes["temperature"] = max(0.0, body.temperature)
    if body.seed is not None:
        changes["seed"] = None if body.seed == -1 else body.seed % (MAX_SEED + 1)
    if body.samplers is not None:
        names = [OTHER_NAMES.get(name, name) for name in body.samplers]
        if "infill" in names:
            _log_infill()
        changes["samplers"] = [name for name in names if name != "infill"]
    return sampling_of(body, engine.sampling_defaults, **changes)


@lru_cache(1)  # said once
def _log_infill() -> None:
    logger.info("llama-server's sampler infill is not supported: it is left out of samplers")


@dataclass
class Lines:
    """Text of an output that `n_indent` or `t_max_predict_ms` may end.

    Attributes
    ----------
    n_indent : int
        Spaces and tabs that each line but the first begins with; a line with fewer ends the output.  0: none.
    max_s : float
        Seconds of output after which a line break ends it; 0: never.
    text : str
        Text so far, without what follows the end.
    n_tokens : int
    is_over : bool
        True once one of the two limits has ended the output.
    """

    n_indent: int
    max_s: float
    text: str = ""
    n_tokens: int = 0
    is_over: bool = False
    _line: int = 0  # start in `text` of the last line that was checked
    _since: float = field(default_factory=time.monotonic)

    def add(self, delta: TokenDelta) -> str:
        """Add a piece of the output, and return the part that is kept."""
        if not self.n_tokens:
            self._since = time.monotonic()
        self.n_tokens += len(delta.token_ids)
        before = len(self.text)
        self.text += delta.text
        while self.n_indent and (newline := self.text.find("\n", self._line)) >= 0:
            line = self.text[newline + 1 :]
            n_space = len(line) - len(line.lstrip(" \t"))
            if n_space == len(line):
                break  # the line may get more white space
            if n_space < self.n_indent:
                self.text = self.text[: max(before, newline + 1 + n_space)]
                self.is_over = True
                break
            self._line = newline + 1
        is_late = self.max_s and time.monotonic() - self._since > self.max_s
        self.is_over |= bool(is_late and "\n" in delta.text)
        return self.text[before:]


def _n_of(state: ServerState, body: Any, n_prompts: int) -> int:
    """Return the number of outputs of each prompt; raise `Problem` (400) for too many."""
    field = "n" if body.n_cmpl is None else "n_cmpl"
    n = 1 if getattr(body, field) is None else getattr(body, field)
    if not 1 <= n <= state.config.max_n:
        raise invalid(field, f"is {n}, must be 1 to {state.config.max_n}")
    if n_prompts * n > state.config.max_prompts:
        raise invalid("prompt", f"prompts times {field} must be at most {state.config.max_prompts}")
    return int(n)


def _answer(
    state: ServerState, body: Any, prompts: Sequence[Prompt], n: int, request: Request
) -> Response:
    engine, request_id = state.serving, request_id_of(request)
    params = _params_of(body, engine)
    check_logprobs(state, params)
    lora = loras_of(engine, body.lora, body.model)
    log_request(state, request_id, prompts)
    observation = state.observation(request, "text_completion", params)

    def open_streams(engine_id: str) -> list[TokenStream]:
        streams: list[TokenStream] = []
        for number in range(0, n * len(prompts), n):
            first = engine.stream(
                prompts[number // n],
                params,
                lora=lora,
                parse_special=True,
                **body.turn,
                request_id=f"{engine_id}/{number}" if number else engine_id,
            )
            streams += [first, *(first.again(i, f"{engine_id}/{number + i}") for i in range(1, n))]
        return streams

    given = [prompt for prompt in prompts for _ in range(n)]
    form = OutputForm(state.model_name, body, params, given)
    return answer(state, form, open_streams, observation, request_id, is_streamed=bool(body.stream))


async def _prompt_text(stream: TokenStream, given: Prompt, token_ids: Sequence[int]) -> str:
    """Return a prompt as text, with `MEDIA_MARKER` in place of each image and recording."""
    if isinstance(given, str) or not any(isinstance(part, Image | Audio) for part in given):
        return await stream.detokenize(token_ids)
    return "".join(part if isinstance(part, str) else MEDIA_MARKER for part in given)


def _part(index: int, text: str, delta: TokenDelta, output: Lines) -> dict[str, Any]:
    part: dict[str, Any] = {
        "index": index,
        "content": text,
        "tokens": delta.token_ids,
        "stop": False,
        "id_slot": NO_SLOT,
        "tokens_predicted": output.n_tokens,
    }
    if delta.logprobs:
        part["completion_probabilities"] = _probabilities(delta.logprobs)
    return part


class OutputForm(AnswerForm):
    """Form of the answers of `/completion` and `/infill`, as llama-server's."""

    def __init__(
        self,
        model_name: str,
        body: LlamaServerFields,
        params: SamplingParams,
        given: Sequence[Prompt],
    ) -> None:
        self._given = given
        self._model_name = model_name
        self._body = body
        wanted = body.response_fields
        self._paths = None if wanted is None else [path.split("/", MAX_PATH) for path in wanted]
        self._params = params
        self.is_prompt_only = _n_max(body) == 0
        max_s = body.t_max_predict_ms / 1000
        self._lines = [Lines(body.n_indent, max_s) for _ in given]
        self._prompts = [""] * len(given)
        self.reads_deltas: bool = bool(body.n_indent or max_s)

    def events(self, index: int, delta: TokenDelta) -> Iterator[Event]:
        """See `AnswerForm`."""
        output = self._lines[index]
        if not output.is_over:
            text = output.add(delta)
            if text or delta.token_ids:
                yield None, _part(index, text, delta, output)

    def is_over(self, index: int) -> bool:
        """See `AnswerForm`."""
        return self._lines[index].is_over

    def check(self, done: Sequence[Completion]) -> None:
        """See `AnswerForm`."""
        for output, one in zip(self._lines, done, strict=True):
            if one.finish_reason is FinishReason.CANCELLED and not output.is_over:
                raise shutting_down()
        check_in_time(done)

    async def look_up(self, stream: TokenStream, done: Sequence[Completion]) -> None:
        """See `AnswerForm`."""
        if self._paths is None or any(path[0] == "prompt" for path in self._paths):
            self._prompts = [
                await _prompt_text(stream, given, one.prompt_token_ids)
                for given, one in zip(self._given, done, strict=True)
            ]

    def end(self, done: Sequence[Completion]) -> Iterator[Event]:
        """See `AnswerForm`."""
        for index, one in enumerate(done):
            yield None, self._output(index, one)

    def whole(self, done: Sequence[Completion]) -> object:
        """See `AnswerForm`."""
        outputs = [self._output(index, one) for index, one in enumerate(done)]
        return outputs if len(outputs) > 1 else outputs[0]

    def _output(self, index: int, done: Completion) -> dict[str, Any]:
        """Return the answer for one output, without the parts already streamed."""
        output = self._lines[index]
        is_streamed = self._body.stream
        text, n_output = done.text, done.usage.n_output
        if output.is_over:  # some more tokens came until it was cancelled
            text, n_output = output.text, output.n_tokens
        returns_tokens = self._body.return_tokens and not is_streamed
        has_stopped = done.finish_reason is FinishReason.STOP and not output.is_over
        by_word = has_stopped and isinstance(done.stop_reason, str)
        answer: dict[str, Any] = {
            "index": index,
            "content": "" if is_streamed else text,
            "tokens": done.token_ids[:n_output] if returns_tokens else (),
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self._model_name,
            "tokens_predicted": n_output,
            "tokens_evaluated": done.usage.n_prompt,
            "generation_settings": _settings(self._params),
            "prompt": self._prompts[index],
            "has_new_line": "\n" in text,
            "truncated": False,
            "stop_type": "word" if by_word else "eos" if has_stopped else "limit",
            **deadline_of(done.finish_reason),
            "stopping_word": done.stop_reason if by_word else "",
            "tokens_cached": done.usage.n_prompt + n_output,
            "timings": _timings(done, n_output),
        }
        if done.logprobs is not None and not is_streamed:
            answer["completion_probabilities"] = _probabilities(done.logprobs[:n_output])
        return answer if self._paths is None else _picked(answer, self._paths)


def _settings(params: SamplingParams) -> dict[str, Any]:
    settings = {name: getattr(params, name) for name in SAMPLING_FIELDS}
    biases = params.logit_bias.items()
    settings["logit_bias"] = [{"token": token, "bias": bias} for token, bias in biases]
    return settings


def _picked(answer: Mapping[str, Any], paths: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the fields of an answer at paths, such as `timings/prompt_n`; missing ones are left out."""
    found = {}
    for path in paths:
        value: Any = answer
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
            if value is None:
                break  # a path may have a million names
        else:
            found["/".join(path)] = value
    return found


def _timings(done: Completion, n_output: int) -> dict[str, Any]:
    n_prompt = done.usage.n_prompt - done.usage.n_cached
    return {
        "cache_n": done.usage.n_cached,
        **_speed("prompt", n_prompt, done.timings.prefill_s),
        **_speed("predicted", n_output, done.timings.decode_s),
    }


def _speed(name: str, n: int, seconds: float | None) -> dict[str, Any]:
    seconds = seconds or 0.0
    return {
        f"{name}_n": n,
        f"{name}_ms": 1000 * seconds,
        f"{name}_per_token_ms": 1000 * seconds / n if n else 0.0,
        f"{name}_per_second": n / seconds if seconds else 0.0,
    }


def _probabilities(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {**_probability(one), "top_logprobs": [_probability(other) for other in one.top]}
        for one in logprobs
    ]


def _probability(logprob: TokenLogprob) -> dict[str, Any]:
    return {
        "id": logprob.token_id,
        "token": logprob.text,
        "bytes": list(logprob.bytes),
        "logprob": max(logprob.logprob, -9999.0),
    }
