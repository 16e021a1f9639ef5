"""Limits of images.  The process that decodes an image imports them, and should not wait for numpy."""

from __future__ import annotations

from cllm.errors import InvalidArgumentError, InvalidRequestError

MAX_FILE_BYTES = 64 << 20
MAX_SIDE = 1 << 14
MAX_PIXELS = 1 << 25


def check_n_bytes(
    n_bytes: int, error: type[InvalidArgumentError] | type[InvalidRequestError]
) -> None:
    """Raise `error` unless a file of an image has 1 byte to 64 MiB."""
    if not 1 <= n_bytes <= MAX_FILE_BYTES:
        raise error("image", f"{n_bytes} bytes", f"1 to {MAX_FILE_BYTES} bytes")


def check_size(height: int, width: int) -> None:
    """Raise `InvalidRequestError` unless an image has a supported number of pixels."""
    if not (min(height, width) >= 1 and max(height, width) <= MAX_SIDE) or (
        height * width > MAX_PIXELS
    ):
        limit = f"at most {MAX_SIDE} pixels on a side and {MAX_PIXELS} in all"
        raise InvalidRequestError("image", f"{width}×{height} pixels", limit)
