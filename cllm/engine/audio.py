"""Audio: a recording in a prompt."""

from __future__ import annotations

import binascii
import os
import struct
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cllm.checks import check_int
from cllm.engine.media_limits import MAX_RATE, MAX_SAMPLES, MIN_RATE, MIN_SAMPLES
from cllm.engine.media_source import Base64Text, MediaSource
from cllm.errors import InvalidArgumentError

WAV_FLOAT = 3  # format of samples in a WAV file
# First bytes of a file of each format, as OpenAI's clients name it.
HEADS: dict[str, bytes | tuple[bytes, ...]] = {
    "flac": b"fLaC",
    "ogg": b"OggS",
    "aiff": b"FORM",
    "mp3": (b"ID3", b"\xff"),
}


class Audio(MediaSource):
    """A recording for a prompt: the path of a file, the bytes of one, or samples.

    Parameters
    ----------
    source : str, Path, bytes or ndarray
        A path or the content of a WAV, FLAC, MP3, Ogg or AIFF file, of at most 64 MiB; or samples: float32 or
        float64 from -1 to 1 (others are clipped) or int16, shape `(n_samples,)` or `(n_samples, n_channels)`.
        The model hears the mean of all channels at its own sample rate.  An array has 2 to 33,554,432 samples
        in each channel; so has a file at the rate of the model.  Samples are copied.
    sample_rate : int
        Samples a second of an array, 1,000 to 768,000; a file has its own.

    Raises
    ------
    InvalidArgumentError
        `source` has another type or shape, or is too large.  Files are read and decoded when a request with
        the audio is submitted, in a process of their own: `InvalidRequestError` then names what is wrong.
        Decoding needs the extra `media`.
    """

    __slots__ = ("sample_rate",)

    kind: ClassVar[str] = "audio"

    def __init__(
        self,
        source: str | os.PathLike[str] | bytes | NDArray[Any] | Base64Text,
        sample_rate: int = 16_000,
    ) -> None:
        super().__init__(source)
        self.sample_rate: int = check_int("sample_rate", sample_rate, MIN_RATE, MAX_RATE)

    @staticmethod
    def _checked(array: NDArray[Any]) -> NDArray[np.float32]:
        scale = 32_768.0 if array.dtype == np.int16 else 1.0
        is_known = array.dtype in (np.float32, np.float64, np.int16)
        if not is_known or array.ndim not in (1, 2) or not array.size:
            given = f"{array.dtype} {array.shape}"
            limit = "float32, float64 or int16, shape (n_samples,) or (n_samples, n_channels)"
            raise InvalidArgumentError("audio", given, limit)
        if not MIN_SAMPLES <= len(array) <= MAX_SAMPLES:
            limit = f"{MIN_SAMPLES} to {MAX_SAMPLES} samples"
            raise InvalidArgumentError("audio", f"{len(array)} samples", limit)
        samples = array.reshape(len(array), -1).mean(axis=1, dtype=np.float64) / scale
        if not np.isfinite(samples).all():
            raise InvalidArgumentError("audio", "an array with infinity or NaN", "finite samples")
        return np.asarray(samples.clip(-1.0, 1.0), np.float32)

    @property
    def _size(self) -> str:
        assert isinstance(self.source, np.ndarray)
        return f"{len(self.source)} samples"

    def file(self) -> bytes:
        """Return the file, samples as a WAV file.  Any thread; reads a file.

        Raises
        ------
        InvalidRequestError
            As for `read`.
        """
        content = self.read()
        return content if isinstance(content, bytes) else _wav(content, self.sample_rate)

    def part(self) -> dict[str, Any]:
        """Return the part of a message for OpenAI's API: `input_audio`.  Any thread; reads a file."""
        data = self.file()
        form = next((form for form, head in HEADS.items() if data.startswith(head)), "wav")
        text = binascii.b2a_base64(data, newline=False).decode()
        return {"type": "input_audio", "input_audio": {"data": text, "format": form}}


def _wav(samples: NDArray[np.float32], rate: int) -> bytes:
    """Return samples as a WAV file of 32-bit floating-point numbers."""
    data = samples.astype("<f4").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, WAV_FLOAT, 1, rate, 4 * rate, 4, 32)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(data)) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body
