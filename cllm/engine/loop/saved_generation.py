"""SavedGeneration: a generation that was suspended, as a value and as a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, get_type_hints

import numpy as np

from cllm.checks import INT32_MAX, check_int
from cllm.engine.audio import Audio
from cllm.engine.chat.chat_prompt import ChatPrompt
from cllm.engine.image import Image
from cllm.engine.loop.channel import Continuation
from cllm.engine.loop.request_call import MixedPrompt, RequestCall
from cllm.engine.media import MediaInput, n_bytes_of
from cllm.engine.media_rows import Spans
from cllm.engine.media_source import MediaSource
from cllm.engine.output import Completion, TokenDelta, TokenLogprob
from cllm.engine.plain_values import as_plain, of_plain
from cllm.engine.request import ModelInfo, SequenceState
from cllm.engine.sampling_params import SamplingParams
from cllm.engine.state_file import DamagedFileError, read_state_file, write_state_file
from cllm.errors import InvalidArgumentError, InvalidRequestError
from cllm.settings import new_path

KIND = "generation 3"
_MODEL_FIELDS = ("architecture", "n_params", "size_bytes", "n_vocab", "n_embd", "n_layer")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SavedGeneration:
    """State with which a suspended generation can resume, in this process or another.

    `TokenStream.suspend` returns it, and `Engine.resume` continues from it, any number of times.

    Attributes
    ----------
    call : RequestCall
        The request, with the tokens so far.
    continuation : Continuation
    model_key : mapping
        Properties that the model must have.
    fingerprint : str
        Fingerprint of the engine; an engine with another one computes the KV state again.
    """

    call: RequestCall
    continuation: Continuation
    model_key: Mapping[str, Any]
    fingerprint: str

    @classmethod
    def of(cls, call: RequestCall, continuation: Continuation, model: ModelInfo) -> Self:
        """Return the saved generation of a model."""
        return cls(call, continuation, _key_of(model), model.fingerprint)

    @property
    def request_id(self) -> str:
        """Id of the suspended stream."""
        return self.call.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt."""
        return self.continuation.prompt_token_ids

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the output so far, including those that the reader had not received."""
        return self.call.generated

    @property
    def n_state_bytes(self) -> int:
        """Bytes of the saved KV state; 0 if it must be computed again."""
        state = self.continuation.state
        return 0 if state is None else len(state.data)

    def on(self, model: ModelInfo) -> Continuation:
        """Return the state from which an engine with this model continues.

        Raises
        ------
        InvalidRequestError
            The engine has another model.
        """
        if (key := _key_of(model)) != self.model_key:
            was = ", ".join(f"{name} {value}" for name, value in self.model_key.items())
            raise InvalidRequestError("saved", model.name or key, f"for the model with {was}")
        is_alike = model.fingerprint == self.fingerprint
        return self.continuation if is_alike else replace(self.continuation, state=None)

    def save(self, path: str | Path) -> None:
        """Write the generation to a file atomically.  Any thread; may take long.

        The file contains the prompt and the output in plain text.

        Raises
        ------
        OSError
            The file cannot be written.
        InvalidArgumentError
            The messages or `chat_template_kwargs` contain a value that JSON does not support.
        """
        before = self.continuation
        state = before.state
        try:
            header = {
                "kind": KIND,
                "model": dict(self.model_key),
                "fingerprint": self.fingerprint,
                "prompt": _plain_prompt(self.call.prompt),
                "call": {
                    f.name: as_plain(getattr(self.call, f.name))
                    for f in fields(RequestCall)
                    if f.name != "prompt"
                },
                "prompt_token_ids": before.prompt_token_ids,
                "earlier": as_plain(before.earlier),
                "logprobs": as_plain(before.logprobs),
                "unread": as_plain(before.unread),
                "n_state_tokens": None if state is None else state.n_tokens,
                "media": [_plain_media(media) for media in before.media],
            }
        except TypeError as error:
            raise InvalidArgumentError(
                "arguments of the request", str(error), "values that JSON has"
            ) from None
        pixels = b"".join(media.data for media in before.media)
        data = pixels + (b"" if state is None else state.data)
        write_state_file(_checked(path), header, data)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` has written.  Any thread; may take long.

        Raises
        ------
        OSError
            The file cannot be read.
        InvalidArgumentError
            The file is of another kind or version, incomplete, or changed.
        """
        checked = _checked(path)
        try:
            header, data = read_state_file(checked)
            if header.get("kind") != KIND:
                raise DamagedFileError(f"{path} is {header.get('kind')!r}, not {KIND!r}")
            return cls._of_header(header, data)
        except DamagedFileError as error:
            limit = f"a file of SavedGeneration.save, unchanged ({error})"
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            limit = f"a file of SavedGeneration.save, of this version ({error!r})"
        raise InvalidArgumentError("path", str(checked), limit)

    @classmethod
    def _of_header(cls, header: Mapping[str, Any], data: bytes) -> Self:
        kinds = get_type_hints(RequestCall)
        given: dict[str, Any] = {
            name: SamplingParams(**_params_of(plain))
            if name == "params"
            else of_plain(kinds[name], plain)
            for name, plain in header["call"].items()
        }
        n_tokens = of_plain(int | None, header["n_state_tokens"])
        prompt_token_ids = of_plain(tuple[int, ...], header["prompt_token_ids"])
        media, data = _media_of(header["media"], data)
        _check_rows(prompt_token_ids, media)
        continuation = Continuation(
            prompt_token_ids=prompt_token_ids,
            media=media,
            earlier=of_plain(Completion | None, header["earlier"]),
            logprobs=of_plain(tuple[TokenLogprob, ...], header["logprobs"]),
            unread=of_plain(tuple[TokenDelta, ...], header["unread"]),
            state=None if n_tokens is None else SequenceState(data, n_tokens),
        )
        n_held = len(prompt_token_ids) + len(given["generated"])
        if n_tokens is not None and not 0 < n_tokens <= n_held:
            raise DamagedFileError(f"a state of {n_tokens} tokens, where there are {n_held}")
        call = RequestCall(prompt=_prompt_of(header["prompt"], media), **given)
        model_key = of_plain(Mapping[str, int | str], header["model"])
        return cls(call, continuation, model_key, of_plain(str, header["fingerprint"]))

    def __repr__(self) -> str:
        n_tokens = len(self.token_ids)
        return f"<SavedGeneration {self.request_id} {n_tokens} tokens {self.n_state_bytes} bytes>"


def _key_of(model: ModelInfo) -> dict[str, Any]:
    return {name: getattr(model, name) for name in _MODEL_FIELDS}


def _check_rows(token_ids: tuple[int, ...], media: tuple[MediaInput, ...]) -> None:
    """Raise `DamagedFileError` unless a prompt consists of tokens and of the chunks of its media."""
    for token in token_ids:
        check_int("prompt_token_ids", token, -INT32_MAX - 1, INT32_MAX, InvalidRequestError)
    spans = Spans.of(token_ids)
    n_rows = sum(span.end - span.start for span in spans)
    is_whole = n_rows == sum(token < 0 for token in token_ids)
    if not is_whole or len(spans) != sum(each.n_chunks for each in media):
        raise DamagedFileError("the prompt has other media than the file")


def _plain_media(media: MediaInput) -> dict[str, Any]:
    plain = {f.name: getattr(media, f.name) for f in fields(MediaInput) if f.name != "data"}
    return {**plain, "digest": media.digest.hex()}


def _media_of(plain: list[dict[str, Any]], data: bytes) -> tuple[tuple[MediaInput, ...], bytes]:
    """Return the images and audio of a file, and the bytes behind their pixels and samples."""
    found = []
    for fields_of_one in plain:
        shape = of_plain(tuple[int, ...], fields_of_one["shape"])
        n_bytes = n_bytes_of(shape)
        if len(shape) not in (1, 2) or not 0 < n_bytes <= len(data):
            raise DamagedFileError(f"{shape} are {n_bytes} bytes, where there are {len(data)}")
        own = {"digest": bytes.fromhex(fields_of_one["digest"]), "shape": shape}
        found.append(MediaInput(**{**fields_of_one, **own, "data": data[:n_bytes]}))
        data = data[n_bytes:]
    return tuple(found), data


def _plain_prompt(prompt: str | tuple[int, ...] | MixedPrompt | ChatPrompt) -> dict[str, Any]:
    if isinstance(prompt, MixedPrompt):  # its media are in `media`
        return {"parts": [part if isinstance(part, str) else None for part in prompt.parts]}
    if isinstance(prompt, ChatPrompt):  # its media are in `media`
        return {"chat": as_plain(replace(prompt, marks=None))}
    return {"text": prompt} if isinstance(prompt, str) else {"token_ids": prompt}


def _prompt_of(
    plain: Mapping[str, Any], media: tuple[MediaInput, ...]
) -> str | tuple[int, ...] | MixedPrompt | ChatPrompt:
    if "parts" in plain:
        sources = map(_source_of, media)
        return MixedPrompt.of(next(sources) if part is None else part for part in plain["parts"])
    if "chat" in plain:
        return ChatPrompt(**plain["chat"])
    return plain["text"] if "text" in plain else tuple(plain["token_ids"])


def _source_of(media: MediaInput) -> MediaSource:
    if media.kind == "image":
        return Image(np.frombuffer(media.data, np.uint8).reshape(*media.shape, 3))
    return Audio(np.frombuffer(media.data, np.float32), media.sample_rate)


def _params_of(plain: Mapping[str, Any]) -> dict[str, Any]:
    biases = {int(token): bias for token, bias in plain["logit_bias"].items()}
    return {**plain, "logit_bias": biases}


def _checked(path: object) -> Path:
    return Path(new_path("path", path, InvalidArgumentError))  # type: ignore[arg-type]  # a path
