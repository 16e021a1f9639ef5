"""Images and audio in parts of messages, as OpenAI's and Anthropic's clients and MCP send them.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from cllm.engine.audio import Audio
from cllm.engine.image import Image
from cllm.engine.media_source import MediaSource
from cllm.errors import InvalidRequestError

# Types of parts whose field `image_url` is a URL, or has one in its field `url`.
IMAGE_URL_TYPES = ("image_url", "input_image", "computer_screenshot")
IMAGE_TYPES = ("image", *IMAGE_URL_TYPES)
AUDIO_TYPES = ("audio", "input_audio", "audio_url")
TYPES = (*IMAGE_TYPES, *AUDIO_TYPES)
RESOURCE = "resource"  # of MCP: a file, which may be an image or audio
DATA_URL = re.compile(r"\s*data:([^,]*),", re.IGNORECASE)
ADDRESS = re.compile(r"\s*https?:", re.IGNORECASE)
MAX_HEAD = 256  # characters before the comma of a data: URL
CLASSES: dict[str, type[Image] | type[Audio]] = {"image": Image, "audio": Audio}


class Address(NamedTuple):
    """Address of an image, and the field that has it."""

    url: str
    field: str


def address_of(part: object, field: str) -> Address | None:
    """Return the http: or https: address of the image of a part; None for a part without one."""
    if not isinstance(part, Mapping) or part.get("type") not in IMAGE_TYPES:
        return None
    name = "source" if part["type"] == "image" else "image_url"
    given, field = part.get(name), f"{field}.{name}"
    if isinstance(given, Mapping):
        given, field = given.get("url"), f"{field}.url"
    is_address = isinstance(given, str) and ADDRESS.match(given)
    return Address(str(given), field) if is_address else None


def media_of(part: object, field: str) -> MediaSource | None:
    """Return the image or audio of a part of a content; None for a part of another type.

    Parameters
    ----------
    field : str
        Name of the part in errors.

    Raises
    ------
    InvalidRequestError
        The part has no image or audio, or has the address of one.  A server replaces the addresses that it
        fetches before this call.
    """
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if kind == RESOURCE and isinstance(resource := part.get(RESOURCE), Mapping):
        name = str(resource.get("mimeType")).partition("/")[0]
        is_media = name in CLASSES
        return (
            _of_base64(name, resource.get("blob"), f"{field}.resource.blob") if is_media else None
        )
    if not isinstance(kind, str) or kind not in TYPES:
        return None
    if kind in IMAGE_URL_TYPES:
        return _at("image", part.get("image_url"), f"{field}.image_url")
    if kind == "audio_url":
        return _at("audio", part.get("audio_url"), f"{field}.audio_url")
    if kind == "input_audio":
        return _input_audio(part.get("input_audio"), f"{field}.input_audio")
    if kind in part:
        media = part[kind]
        if not isinstance(media, CLASSES[kind]):
            raise InvalidRequestError(f"{field}.{kind}", media, f"a cllm.{kind.capitalize()}")
        return media
    if "source" not in part:  # as results of MCP's tools
        return _of_base64(kind, part.get("data"), f"{field}.data")
    source = part["source"]
    source = source if isinstance(source, Mapping) else {}
    if source.get("type") == "base64":
        return _of_base64(kind, source.get("data"), f"{field}.source.data")
    if source.get("type") == "url":
        return _at(kind, source.get("url"), f"{field}.source.url")
    raise InvalidRequestError(f"{field}.source.type", source.get("type"), '"base64" or "url"')


def _input_audio(given: object, field: str) -> MediaSource:
    """Return the audio of OpenAI's part: base64 text, or a data: URL as some clients send it."""
    data = given.get("data") if isinstance(given, Mapping) else None
    field = f"{field}.data"
    if isinstance(data, str) and DATA_URL.match(data, 0, MAX_HEAD):
        return _at("audio", data, field)
    return _of_base64("audio", data, field)


def _at(kind: str, given: object, field: str) -> MediaSource:
    if isinstance(given, Mapping):
        given, field = given.get("url"), f"{field}.url"
    head = DATA_URL.match(given, 0, MAX_HEAD) if isinstance(given, str) else None
    if head is None or not head[1].lower().endswith(";base64"):
        shown = given[:80] if isinstance(given, str) else given
        example = {"image": "image/png", "audio": "audio/wav"}[kind]
        raise InvalidRequestError(
            field, shown, f"a data: URL with base64 (data:{example};base64,…)"
        )
    assert isinstance(given, str)
    return _of_base64(kind, given, field, head.end())


def _of_base64(kind: str, text: object, field: str, start: int = 0) -> MediaSource:
    if not isinstance(text, str):
        raise InvalidRequestError(field, text, "a file as base64 text")
    try:
        return CLASSES[kind].of_base64(text, start)
    except InvalidRequestError as error:
        raise InvalidRequestError(field, error.value, error.limit) from None
