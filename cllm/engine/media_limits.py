"""Limits of images and audio.  The process that decodes them imports them, and should not wait for numpy."""

from __future__ import annotations

from cllm.errors import InvalidArgumentError, InvalidRequestError

MAX_FILE_BYTES = 64 << 20
MAX_SIDE = 1 << 14
MAX_PIXELS = 1 << 25
# One sample aborts libmtmd.  The upper limit is 35 minutes at 16 kHz.
MIN_SAMPLES, MAX_SAMPLES = 2, 1 << 25
MIN_RATE, MAX_RATE = 1_000, 768_000  # samples a second


def is_audio(head: bytes) -> bool:
    """True if these are the first 12 bytes of a file of audio: WAV, FLAC, Ogg, AIFF or MP3."""
    if head[:4] in (b"RIFF", b"RF64", b"FORM"):  # WebP begins with RIFF, too
        return head[8:12] in (b"WAVE", b"AIFF", b"AIFC")
    # A frame of MP3 without a tag: layer 3, and a rate of bits and of samples.
    is_frame = len(head) > 2 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2
    return is_frame or head[:4] in (b"fLaC", b"OggS") or head[:3] == b"ID3"


def check_n_bytes(
    kind: str, n_bytes: int, error: type[InvalidArgumentError] | type[InvalidRequestError]
) -> None:
    """Raise `error` unless a file of an image or of audio has 1 byte to 64 MiB."""
    if not 1 <= n_bytes <= MAX_FILE_BYTES:
        raise error(kind, f"{n_bytes} bytes", f"1 to {MAX_FILE_BYTES} bytes")


def check_size(height: int, width: int) -> None:
    """Raise `InvalidRequestError` unless an image has a supported number of pixels."""
    if not (min(height, width) >= 1 and max(height, width) <= MAX_SIDE) or (
        height * width > MAX_PIXELS
    ):
        limit = f"at most {MAX_SIDE} pixels on a side and {MAX_PIXELS} in all"
        raise InvalidRequestError("image", f"{width}×{height} pixels", limit)


def check_n_samples(n_samples: int) -> None:
    """Raise `InvalidRequestError` unless a recording has a supported number of samples."""
    if not MIN_SAMPLES <= n_samples <= MAX_SAMPLES:
        limit = f"{MIN_SAMPLES} to {MAX_SAMPLES} samples at the rate of the model"
        raise InvalidRequestError("audio", f"{n_samples} samples", limit)
