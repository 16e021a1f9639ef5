"""Pulls: downloads of models that clients ask for, one at a time.  Event loop only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from threading import Thread
from typing import Any

import anyio

from cllm import CllmError
from cllm.hub.download import Download, check_library
from cllm.hub.names import PREFIX, ModelName, parse_name
from cllm.server.http.problems import Problem, invalid

PAUSE_S = 0.2  # between two reports
# Beginnings of names of the hub, as Ollama's users write them.
HOSTS = ("hf.co/", "huggingface.co/")


class Pull:
    """One download, in a thread of its own.  It continues after its client has left.

    Attributes
    ----------
    model : ModelName
    """

    def __init__(self, model: ModelName) -> None:
        self.model = model
        self._download: Download | None = None
        self._failure: str | None = None
        self._thread = Thread(target=self._run, name="pull", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._download = Download(self.model)
            self._download.run()
        except CllmError as error:
            self._failure = str(error)
        except Exception as error:
            self._failure = f"the download failed ({type(error).__name__}: {error})"
            raise

    @property
    def is_running(self) -> bool:
        """True until the files are here, or the download has failed."""
        return self._thread.is_alive()

    async def reports(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the progress, as Ollama's `/api/pull` has it.

        Raises
        ------
        Problem
            502: the download failed; the message has the reason.
        """
        yield {"status": "pulling manifest"}
        while self.is_running:
            if (download := self._download) is not None:
                n_here = await anyio.to_thread.run_sync(lambda: download.n_bytes_here)
                yield {
                    "status": f"pulling {self.model}",
                    "total": download.n_bytes,
                    "completed": n_here,
                }
            await anyio.sleep(PAUSE_S)
        if self._failure is not None:
            raise Problem(502, self._failure)
        yield {"status": "success"}


class Pulls:
    """Begins downloads.

    Parameters
    ----------
    on_success : callable
        Called with the name of each model whose reports were read to their successful end.
    """

    def __init__(self, on_success: Callable[[str], None] = lambda _: None) -> None:
        self._on_success = on_success
        self._pull: Pull | None = None

    async def reports(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Download a model, and yield the progress; the download of the same model is joined.

        Raises
        ------
        Problem
            400: this is not a name; 409: another model is being downloaded; and as `Pull.reports`.
        """
        model = _model_of(name)
        if self._pull is None or not self._pull.is_running:
            self._pull = Pull(model)
        elif self._pull.model != model:
            raise Problem(
                409, f"{self._pull.model} is being downloaded, and only one model at a time"
            )
        async for report in self._pull.reports():
            yield report
        self._on_success(str(model))


def _model_of(name: str) -> ModelName:
    for host in HOSTS:
        if name.startswith(host):
            name = PREFIX + name.removeprefix(host)
    try:
        model = parse_name(name)
        check_library(name)
    except CllmError as error:
        raise invalid("model", str(error)) from None
    return model
