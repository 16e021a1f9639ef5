"""Images in parts of messages, as OpenAI's and Anthropic's clients and MCP send them.  Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from cllm.engine.image import Image
from cllm.errors import InvalidRequestError

# Types of parts whose field `image_url` is a URL, or has one in its field `url`.
URL_TYPES = ("image_url", "input_image", "computer_screenshot")
TYPES = ("image", *URL_TYPES)
RESOURCE = "resource"  # of MCP: a file, which may be an image
DATA_URL = re.compile(r"\s*data:([^,]*),", re.IGNORECASE)
ADDRESS = re.compile(r"\s*https?:", re.IGNORECASE)
MAX_HEAD = 256  # characters before the comma of a data: URL


class Address(NamedTuple):
    """Address of an image, and the field that has it."""

    url: str
    field: str


def address_of(part: object, field: str) -> Address | None:
    """Return the http: or https: address of the image of a part; None for a part without one."""
    if not isinstance(part, Mapping) or part.get("type") not in TYPES:
        return None
    name = "source" if part["type"] == "image" else "image_url"
    given, field = part.get(name), f"{field}.{name}"
    if isinstance(given, Mapping):
        given, field = given.get("url"), f"{field}.url"
    is_address = isinstance(given, str) and ADDRESS.match(given)
    return Address(str(given), field) if is_address else None


def image_of(part: object, field: str) -> Image | None:
    """Return the image of a part of a content; None for a part of another type.

    Parameters
    ----------
    field : str
        Name of the part in errors.

    Raises
    ------
    InvalidRequestError
        The part has no image, or has the address of one.  A server replaces the addresses that it fetches
        before this call.
    """
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if kind == RESOURCE and isinstance(resource := part.get(RESOURCE), Mapping):
        is_image = str(resource.get("mimeType")).startswith("image/")
        return _of_base64(resource.get("blob"), f"{field}.resource.blob") if is_image else None
    if not isinstance(kind, str) or kind not in TYPES:
        return None
    if kind in URL_TYPES:
        return _image_at(part.get("image_url"), f"{field}.image_url")
    if "image" in part:
        image = part["image"]
        if not isinstance(image, Image):
            raise InvalidRequestError(f"{field}.image", image, "a cllm.Image")
        return image
    if "source" not in part:  # as results of MCP's tools
        return _of_base64(part.get("data"), f"{field}.data")
    source = part["source"]
    source = source if isinstance(source, Mapping) else {}
    if source.get("type") == "base64":
        return _of_base64(source.get("data"), f"{field}.source.data")
    if source.get("type") == "url":
        return _image_at(source.get("url"), f"{field}.source.url")
    raise InvalidRequestError(f"{field}.source.type", source.get("type"), '"base64" or "url"')


def _image_at(given: object, field: str) -> Image:
    if isinstance(given, Mapping):
        given, field = given.get("url"), f"{field}.url"
    head = DATA_URL.match(given, 0, MAX_HEAD) if isinstance(given, str) else None
    if head is None or not head[1].lower().endswith(";base64"):
        shown = given[:80] if isinstance(given, str) else given
        raise InvalidRequestError(field, shown, "a data: URL with base64 (data:image/png;base64,…)")
    assert isinstance(given, str)
    return _of_base64(given, field, head.end())


def _of_base64(text: object, field: str, start: int = 0) -> Image:
    if not isinstance(text, str):
        raise InvalidRequestError(field, text, "a file as base64 text")
    try:
        return Image.of_base64(text, start)
    except InvalidRequestError as error:
        raise InvalidRequestError(field, error.value, error.limit) from None
