"""`/`: a page with a chat and a view of the engine; its files are in the package and use no other host."""

from __future__ import annotations

import functools
import gzip
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
def _compressed(path: Path) -> bytes:
    """Return a file of the page as gzip."""
    return gzip.compress(path.read_bytes(), mtime=0)


def _answer_with(path: Path) -> Callable[[Request], Awaitable[Response]]:
    media_type = mimetypes.guess_type(path.name)[0]

    async def answer(request: Request) -> Response:
        headers = dict(HEADERS)
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["Content-Encoding"] = "gzip"
            content = await to_thread.run_sync(_compressed, path)
        else:
            content = await to_thread.run_sync(path.read_bytes)
        return Response(content, headers=headers, media_type=media_type)

    return answer
