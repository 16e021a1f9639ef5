"""OpenAI's endpoint for transcriptions: the model writes what it hears in a file of audio."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cllm import (
    Audio,
    Completion,
    InvalidArgumentError,
    SamplingOptions,
    SamplingParams,
    TokenDelta,
)
from cllm.server.answers.answer import AnswerForm
from cllm.server.answers.chat_call import ChatCall, answer_chat
from cllm.server.answers.formats import finish_reason_of
from cllm.server.http.body import turn_of
from cllm.server.http.problems import Problem, invalid
from cllm.server.http.replies import DONE, Event
from cllm.server.routes.loras import loras_of
from cllm.server.state import log_request, request_id_of, state_of

router: APIRouter = APIRouter(tags=["OpenAI"])

FORM_TYPE = b"multipart/form-data"
ASKED = "Transcribe audio to text"  # as llama-server asks
# LFM2 was trained to transcribe with this system message, and no text of a user.
LFM2, LFM2_SYSTEM = "lfm2", "Perform ASR."
FORMATS = ("json", "text")  # others have timestamps, which these models do not give
PART = re.compile(r"messages\[\d\]\.content\[\d\].*")
# Fields of OpenAI's clients that change nothing here, without what stands in brackets.
HARMLESS = frozenset(("include", "chunking_strategy", "timestamp_granularities"))
MAX_FIELDS, MAX_FIELD_BYTES = 32, 1 << 16
FIELDS = {
    "file": {"type": "string", "format": "binary", "description": "WAV, FLAC, MP3, Ogg or AIFF"},
    "model": {"type": "string", "description": "Any name, or that of a LoRA adapter"},
    "prompt": {"type": "string", "description": f"What the model is asked; default: {ASKED}"},
    "language": {"type": "string", "description": "Language of the speech"},
    "response_format": {"type": "string", "enum": [*FORMATS]},
    "temperature": {"type": "number", "minimum": 0, "default": 0},
    "max_tokens": {"type": "integer", "minimum": 1},
    "stream": {"type": "boolean", "default": False},
}  # fmt: skip
BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {"type": "object", "required": ["file"], "properties": FIELDS}
        }
    },
}


class TranscriptionForm(AnswerForm):
    """Answers of `/v1/audio/transcriptions`: an object with the text, or events with its parts."""

    prompt_field = "file"

    def __init__(self) -> None:
        self._has_begun = False

    def events(self, index: int, delta: TokenDelta) -> Iterator[Event]:
        """See `AnswerForm`."""
        text = delta.text if self._has_begun else delta.text.lstrip()
        if text:
            self._has_begun = True
            yield None, {"type": "transcript.text.delta", "delta": text}

    def end(self, done: Sequence[Completion]) -> Iterator[Event]:
        """See `AnswerForm`."""
        yield None, {"type": "transcript.text.done", **self.whole(done)}
        yield None, DONE

    def whole(self, done: Sequence[Completion]) -> dict[str, Any]:
        """See `AnswerForm`."""
        usage = done[0].usage
        n_audio = usage.n_audio_tokens
        details = {"audio_tokens": n_audio, "text_tokens": usage.n_prompt - n_audio}
        return {
            "text": done[0].text.lstrip(),
            "finish_reason": finish_reason_of(done[0].finish_reason),
            "usage": {
                "type": "tokens",
                "input_tokens": usage.n_prompt,
                "input_token_details": details,
                "output_tokens": usage.n_output,
                "total_tokens": usage.n_prompt + usage.n_output,
            },
        }


class PlainTranscriptionForm(TranscriptionForm):
    """The same with `response_format` "text": the text alone."""

    is_plain = True

    def whole(self, done: Sequence[Completion]) -> Any:
        """See `AnswerForm`."""
        return done[0].text.lstrip() + "\n"


class _FileCall(ChatCall):
    """A chat about a file: its messages are the server's own, and have the file and the prompt."""

    def _name_of(self, field: str) -> str:
        if field.startswith("messages"):
            return "file" if PART.fullmatch(field) else "prompt"
        return field


@router.post("/audio/transcriptions", include_in_schema=False)
@router.post(
    "/v1/audio/transcriptions",
    summary="Write what is said in a recording",
    openapi_extra={"requestBody": BODY},
)
async def transcriptions(request: Request) -> Response:
    """Ask the model for the text of a recording, as llama-server does; for models that take audio."""
    state, request_id = state_of(request), request_id_of(request)
    engine = state.serving
    audio, fields = await _read(request)
    form = _checked_format(fields)
    is_streamed = _flag(fields, "stream")
    if is_streamed and form.is_plain:
        raise invalid("stream", "is for response_format json")
    call = _FileCall(
        _messages(engine.model.architecture, audio, fields),
        {},
        _params(engine.sampling_defaults, fields),
        {"lora": loras_of(engine, None, fields.get("model")), **turn_of(request)},
    )
    log_request(state, request_id, [{"role": "user", "content": audio.shown}])
    observation = state.observation(request, "transcription", call.params)
    return answer_chat(state, call, form, observation, request_id, is_streamed=is_streamed)


async def _read(request: Request) -> tuple[Audio, dict[str, str]]:
    """Return the file and the other fields of a form."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != FORM_TYPE:
        raise invalid("file", "is missing: send a form (multipart/form-data) with a file")
    if options.get(b"charset", b"utf-8").lower() not in (b"utf-8", b"utf8"):
        raise Problem(400, "content-type: a form has the charset utf-8")
    try:
        async with request.form(
            max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES
        ) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise invalid("file", "is missing, or is no file")
            fields = {name: value for name, value in form.items() if isinstance(value, str)}
            for name in fields:
                if name not in FIELDS and name.partition("[")[0] not in HARMLESS:
                    raise invalid(name[:80], f"is unknown; known are {', '.join(FIELDS)}")
            return Audio(await file.read()), fields
    except InvalidArgumentError as error:
        raise invalid("file", f"is {error.value}, must be {error.limit}") from None
    except ClientDisconnect:
        raise Problem(400, "the client left before its body was complete") from None
    except HTTPException as error:
        raise Problem(400, f"the body is no form: {error.detail}") from None


def _messages(architecture: str, audio: Audio, fields: dict[str, str]) -> list[dict[str, Any]]:
    part = {"type": "audio", "audio": audio}
    prompt, language = fields.get("prompt", ""), fields.get("language", "")
    spoken = f" (language: {language})" if language else ""
    if architecture.startswith(LFM2) and not prompt:
        system = {"role": "system", "content": LFM2_SYSTEM + spoken}
        return [system, {"role": "user", "content": [part]}]
    text = (prompt or ASKED) + spoken
    return [{"role": "user", "content": [{"type": "text", "text": text}, part]}]


def _params(defaults: SamplingOptions, fields: dict[str, str]) -> SamplingParams:
    """Return the sampling parameters: the likeliest tokens, unless the form has a temperature."""
    given: dict[str, Any] = {"temperature": 0.0}
    for name, kind in (("temperature", float), ("max_tokens", int)):
        if name in fields:
            try:
                given[name] = kind(fields[name])
            except ValueError:
                raise invalid(name, f"is {fields[name][:40]!r}, must be a number") from None
    return SamplingParams(**{**defaults, **given})


def _checked_format(fields: dict[str, str]) -> TranscriptionForm:
    wanted = fields.get("response_format", "json")
    if wanted not in FORMATS:
        raise invalid("response_format", f"is {wanted[:40]!r}, must be {' or '.join(FORMATS)}")
    return PlainTranscriptionForm() if wanted == "text" else TranscriptionForm()


def _flag(fields: dict[str, str], name: str) -> bool:
    given = fields.get(name, "false").lower()
    if given not in ("true", "false"):
        raise invalid(name, f"is {given[:40]!r}, must be true or false")
    return given == "true"
