"""`/`: a page with a chat and a view of the engine; its files are in the package and use no other host."""

from __future__ import annotations

import functools
import gzip
import hashlib
import mimetypes
from collections.abc import Awaitable, Callable
from pathlib import Path

from anyio import to_thread
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cllm.server.http.limits import PAGE_URL

FILES = Path(__file__).parents[1] / "page_files"
# No content of other hosts and no inline script: a model's output cannot run as code in the page.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; media-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",  # a newer cllm has newer files
    "Vary": "Accept-Encoding",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_page(app: FastAPI) -> None:
    """Serve the page and its files."""
    for path in sorted(FILES.iterdir()):
        url = "/" if path.name == "index.html" else f"{PAGE_URL}/{path.name}"
        app.router.routes.append(Route(url, _answer_with(path), include_in_schema=False))


@functools.cache
def _content(path: Path, is_compressed: bool) -> tuple[bytes, str]:
    """Return the content of a file of the page, gzip-compressed or not, and its entity tag."""
    content = path.read_bytes()
    if is_compressed:
        content = gzip.compress(content, mtime=0)
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def takes_gzip(accepted: str) -> bool:
    """Return True if an `Accept-Encoding` header allows gzip."""
    for item in accepted.lower().split(","):
        coding, _, parameters = item.partition(";")
        if coding.strip() in ("gzip", "x-gzip", "*"):
            quality = parameters.partition("q=")[2].strip() or "1"
            return quality.strip("0.") != ""
    return False


def _answer_with(path: Path) -> Callable[[Request], Awaitable[Response]]:
    media_type = mimetypes.guess_type(path.name)[0]

    async def answer(request: Request) -> Response:
        is_compressed = takes_gzip(request.headers.get("accept-encoding", ""))
        content, tag = await to_thread.run_sync(_content, path, is_compressed)
        headers = HEADERS | {"ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        if is_compressed:
            headers["Content-Encoding"] = "gzip"
        return Response(content, headers=headers, media_type=media_type)

    return answer
