"""A local server with the part of the Hugging Face API that huggingface_hub uses, and with faults."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = "user/model-GGUF"


@dataclass
class FakeHub:
    """Files and faults of a hub, and the requests that it got.

    Attributes
    ----------
    files : dict
        Contents of the one repository's files, by path.
    sent : dict
        Contents that are sent in place of those in `files`, by path.
    cut_after : list of int
        Numbers of bytes after which the next answers with a file end.
    statuses : list of (int, str)
        Status and `X-Error-Code` of the next answers, whatever is requested.
    asked : list
        Method, path and headers of each request.
    listed : dict
        False values for the description of the repository: `rfilename`, `sha256`, `size`, `sha`.
    n_sent : Counter
        Bytes sent, by path.
    resumes : bool
        False sends the whole file, with status 200, for a request of its rest.
    page_after_cut : bytes, optional
        Content that is sent in place of any file from the first answer on that was cut.
    stops_after : int, optional
        Bytes after which an answer with a file pauses: it sets `has_stopped` and waits for `goes_on`.
    """

    files: dict[str, bytes]
    sent: dict[str, bytes] = field(default_factory=dict)
    cut_after: list[int] = field(default_factory=list)
    statuses: list[tuple[int, str]] = field(default_factory=list)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    n_sent: Counter[str] = field(default_factory=Counter)
    listed: dict[str, Any] = field(default_factory=dict)
    stops_after: int | None = None
    resumes: bool = True
    page_after_cut: bytes | None = None
    has_stopped: Event = field(default_factory=Event)
    goes_on: Event = field(default_factory=Event)
    url: str = ""

    @property
    def commit(self) -> str:
        """Commit id, a hash of all contents."""
        return hashlib.sha1(b"".join(self.files.values())).hexdigest()


def sha256_of(data: bytes) -> str:
    """Return the SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def running_hub(files: dict[str, bytes]) -> Iterator[FakeHub]:
    """A hub that has these files, on a free port."""
    hub = FakeHub(files)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        """Log nothing to standard error."""

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, self.path, dict(self.headers)))
        if hub.statuses:
            self._refuse(*hub.statuses.pop(0))
        elif path == f"/api/models/{REPO}":
            self._send(json.dumps(self._described()).encode(), {})
        elif (file := path.removeprefix(f"/{REPO}/resolve/{hub.commit}/")) in hub.files:
            self._send_file(file)
        else:
            self._refuse(404, "EntryNotFound" if f"/{REPO}/" in path else "RepoNotFound")

    def _described(self) -> dict[str, Any]:
        listed = self.hub.listed
        siblings = [
            {
                "rfilename": listed.get("rfilename", path), "size": len(data), "blobId": "0" * 40,
                "lfs": {
                    "sha256": listed.get("sha256", sha256_of(data)),
                    "size": listed.get("size", len(data)),
                    "pointerSize": 134,
                },
            }
            for path, data in self.hub.files.items()
        ]  # fmt: skip
        commit = listed.get("sha", self.hub.commit)
        return {"id": REPO, "modelId": REPO, "sha": commit, "siblings": siblings}

    def _send_file(self, path: str) -> None:
        data, etag = self.hub.files[path], f'"{sha256_of(self.hub.files[path])}"'
        headers = {
            "ETag": etag, "Accept-Ranges": "bytes",
        }  # fmt: skip
        data = self.hub.sent.get(path, data)
        asked = self.headers.get("Range", "bytes=0-") if self.hub.resumes else "bytes=0-"
        start = int(asked.removeprefix("bytes=").rstrip("-"))
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(data[start:], headers, 206 if start else 200, file=path)

    def _send(
        self, data: bytes, headers: dict[str, str], status: int = 200, *, file: str = ""
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if file and self.hub.cut_after:
            data = data[: self.hub.cut_after.pop(0)]
            if self.hub.page_after_cut is not None:
                self.hub.sent[file] = self.hub.page_after_cut
        if file and self.hub.stops_after is not None:
            data = data[: self.hub.stops_after]
        if file:  # counted first: the client may be done before this thread resumes
            self.hub.n_sent[file] += len(data)
        with suppress(ConnectionError):  # the client has gone
            self.wfile.write(data)
        if file and self.hub.stops_after is not None:
            self.wfile.flush()
            self.hub.has_stopped.set()
            self.hub.goes_on.wait(60)

    def _refuse(self, status: int, code: str) -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._send(b"{}", headers | ({"Retry-After": "0"} if status == 429 else {}), status)
