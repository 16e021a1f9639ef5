"""The process that decodes the images and audio of one prompt: `python -m cllm.engine.media_child SECONDS`.

Standard input has a line `image|RATE N_BYTES` and a file, for each file.  The answer is a line of JSON,
`{"shape": […]}` and the pixels or samples behind it, or `{"error": …}`.  Pillow and libsndfile decode, and not
the decoders of libmtmd: they have the fixes of security reports, more formats, and the orientation of
photographs.  Whatever a damaged file does, it does in this process, which has limits for memory and for the time
of each file.
"""

from __future__ import annotations

import io
import json
import sys
import warnings

from cllm.engine.child_process import end_after
from cllm.engine.media_limits import (
    MAX_RATE,
    MAX_SAMPLES,
    MIN_RATE,
    check_n_samples,
    check_size,
    is_audio,
)
from cllm.errors import InvalidRequestError, MissingExtraError, extra
from cllm.system import limit_memory, lower_priority

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MAX_CHANNELS = 64
N_FRAMES = 1 << 16  # of a block
MEMORY_BYTES = 1 << 30
# Decodes of the engine go first: each token waits for the slowest of their threads.
NICE = 5
KINDS = {
    "image": ("an image", "an intact PNG, JPEG, WebP, BMP or GIF file"),
    "audio": ("audio", "an intact WAV, FLAC, MP3, Ogg or AIFF file"),
}


def pixels_of(data: bytes) -> tuple[tuple[int, ...], bytes]:
    """Return height and width, and the pixels: uint8, red, green, blue; transparent parts are white.

    Raises
    ------
    InvalidRequestError
        The header states too many pixels, before any is decoded.
    MissingExtraError
        Pillow is not installed.
    Exception
        Pillow cannot decode the file.
    """
    with extra("media"):
        from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = None  # `check_size` has the limit
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        check_size(image.height, image.width)
        # A damaged file raises an error here, at the first load alone: the next one succeeds, with black pixels.
        image.load()
        try:
            upright = ImageOps.exif_transpose(image)
        except Exception:  # damaged metadata does no harm
            upright = image.copy()
        if upright.mode.startswith("I;16"):  # 16 bits a pixel: `convert` would cut the values off
            upright = upright.point(lambda value: value / 256).convert("L")
        elif "transparency" in upright.info or "A" in upright.getbands():
            layer = upright.convert("RGBA")
            upright = Image.new("RGBA", layer.size, "white")
            upright.alpha_composite(layer)
        pixels = upright.convert("RGB")
        return (pixels.height, pixels.width), pixels.tobytes()


def samples_of(data: bytes, rate: int) -> tuple[tuple[int, ...], bytes]:
    """Return the number of samples, and the mean of all channels at this sample rate: float32.

    Raises
    ------
    InvalidRequestError
        The file has too few or too many samples, channels, or samples a second.
    MissingExtraError
        soundfile or soxr is not installed.
    Exception
        libsndfile cannot decode the file.
    """
    with extra("media"):
        import numpy as np
        import soundfile
        import soxr

    nothing = np.zeros(0, np.float32)
    if not is_audio(data[:12]):
        raise ValueError("another kind of file")
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        for name, value, low, high in (
            ("channels", file.channels, 1, MAX_CHANNELS),
            ("samples a second", file.samplerate, MIN_RATE, MAX_RATE),
        ):
            if not low <= value <= high:
                raise InvalidRequestError("audio", f"{value} {name}", f"{low} to {high} {name}")
        stream = soxr.ResampleStream(file.samplerate, rate, 1, dtype="float32")
        blocks, n_samples = [], 0
        # A header can state any length, so the samples are counted as they are read.
        while n_samples <= MAX_SAMPLES:
            block = file.read(N_FRAMES, dtype="float32", always_2d=True)
            mean = np.nan_to_num(block.mean(axis=1)).clip(-1.0, 1.0) if len(block) else nothing
            found = stream.resample_chunk(mean, last=not len(block))
            blocks.append(found)
            n_samples += len(found)
            if not len(block):
                break
        check_n_samples(n_samples)
        return (n_samples,), np.concatenate(blocks).clip(-1.0, 1.0).tobytes()


def main(seconds: str) -> None:
    """Decode the files of standard input; the process ends if one takes `seconds`."""
    end_after(int(seconds))
    lower_priority(NICE)
    warnings.simplefilter("ignore")  # damaged metadata does no harm
    while asked := sys.stdin.buffer.readline():
        end_after(int(seconds))
        wanted, n_bytes = asked.decode().split()
        answer, content = _decoded(sys.stdin.buffer.read(int(n_bytes)), wanted)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        content = b""  # before the next file needs memory
        end_after(0)


def _decoded(data: bytes, wanted: str) -> tuple[dict[str, object], bytes]:
    name, intact = KINDS["image" if wanted == "image" else "audio"]
    try:
        with extra("media"):  # before the limit: libraries take address space
            if wanted == "image":
                import PIL.Image  # noqa: F401
            else:
                import soundfile  # noqa: F401
                import soxr  # noqa: F401
        limit_memory(MEMORY_BYTES)
        shape, content = pixels_of(data) if wanted == "image" else samples_of(data, int(wanted))
        return {"shape": shape}, content
    except MissingExtraError as error:
        return {"missing": str(error)}, b""
    except InvalidRequestError as error:
        return {"error": error.limit, "value": error.value}, b""
    except MemoryError:
        return {"error": f"{name} that is decoded with {MEMORY_BYTES >> 20} MiB of memory"}, b""
    except Exception as error:
        return {"error": f"{intact} ({type(error).__name__})"}, b""


if __name__ == "__main__":
    main(*sys.argv[1:])
