"""The process that decodes an image: `python -m cllm.engine.image_child SECONDS`.

It reads a file from standard input.  Its output is a line of JSON, `{"height": …, "width": …}` and the pixels
behind it, or `{"error": …}`.  Pillow decodes, and not the decoder of libmtmd: Pillow has the fixes of security
reports, more formats, and the orientation of photographs.  Whatever a damaged file does, it does in this
process, which has limits for memory and time.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import warnings

from cllm.engine.child_process import limit_memory
from cllm.engine.image_limits import check_size
from cllm.errors import InvalidRequestError, MissingExtraError, extra

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MEMORY_BYTES = 1 << 30
# Decodes of the engine go first: each token waits for the slowest of their threads.
NICE = 5


def decoded(data: bytes) -> tuple[int, int, bytes]:
    """Return height, width and pixels: uint8, red, green, blue; transparent parts are white.

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
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I;16"):  # 16 bits a pixel: `convert` would cut the values off
            upright = upright.point(lambda value: value / 256).convert("L")
        elif "transparency" in upright.info or "A" in upright.getbands():
            layer = upright.convert("RGBA")
            upright = Image.new("RGBA", layer.size, "white")
            upright.alpha_composite(layer)
        pixels = upright.convert("RGB")
        return pixels.height, pixels.width, pixels.tobytes()


def main(seconds: str) -> None:
    """Decode standard input; SIGALRM ends the process after `seconds`."""
    signal.alarm(int(seconds))
    os.nice(NICE)
    warnings.simplefilter("ignore")  # damaged metadata does no harm
    data, pixels = sys.stdin.buffer.read(), b""
    try:
        with extra("media"):
            import PIL.Image  # noqa: F401  # before the limit: libraries take address space
        limit_memory(MEMORY_BYTES)
        height, width, pixels = decoded(data)
        answer: dict[str, object] = {"height": height, "width": width}
    except MissingExtraError as error:
        answer = {"missing": str(error)}
    except InvalidRequestError as error:
        answer = {"error": error.limit, "value": error.value}
    except MemoryError:
        answer = {"error": f"an image that is decoded with {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:
        answer = {"error": f"an intact PNG, JPEG, WebP, BMP or GIF file ({type(error).__name__})"}
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + pixels)


if __name__ == "__main__":
    main(sys.argv[1])
