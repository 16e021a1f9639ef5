"""Downloads of models that clients ask for, one at a time.  Event loop only."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import anyio

from cllm import CllmError
from cllm.hub.cache import cached_files
from cllm.hub.download import Download, check_library
from cllm.hub.names import PREFIX, ModelName, is_name, parse_name
from cllm.server.http.problems import Problem, invalid, shutting_down

logger: logging.Logger = logging.getLogger("cllm.server")
_COMMIT = re.compile("/snapshots/[0-9a-f]{40}/")

PAUSE_S = 0.2  # between two reports
# Beginnings of names of the hub, as Ollama's users write them.
HOSTS = ("hf.co/", "huggingface.co/")


class Pull:
    """One download, in a thread of its own.  It continues after its client has left.

    Attributes
    ----------
    name : str
        Name of the model, `hf:USER/REPO…`.
    download : Download or None
        None until the hub has listed the files.
    failure : str or None
        Reason of a failure.
    """

    def __init__(self, model: ModelName) -> None:
        self._model = model
        self.name = str(model)
        self.download: Download | None = None
        self.failure: str | None = None
        self._is_cancelled = Event()
        self._thread = Thread(target=self._run, name="pull", daemon=True)
        logger.info("downloading %s", self.name)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.download = Download(self._model, self._is_cancelled.is_set)
            self.download.run()
        except CllmError as error:
            self.failure = str(error)
            logger.warning("%s", error)
        except Exception:
            self.failure = f"the download of {self.name} failed; the server's log has the reason"
            logger.exception("the download of %s failed", self.name)
        else:
            logger.info("downloaded %s", self.name)

    def cancel(self) -> None:
        """End the download; its thread ends at the next bytes of the hub, and what is here is kept."""
        self._is_cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """True after `cancel`."""
        return self._is_cancelled.is_set()

    @property
    def is_running(self) -> bool:
        """True until the files are here, or the download has failed or was cancelled."""
        return self._thread.is_alive() and not self.is_cancelled


class Pulls:
    """The downloads of one server.

    Parameters
    ----------
    on_success : callable
        Called with the name of each model that was downloaded, before its clients are told.
    """

    def __init__(self, on_success: Callable[[str], None] = lambda _: None) -> None:
        self._on_success = on_success
        self._pull: Pull | None = None
        self._is_told = True  # `on_success` knows the end of `_pull`
        self.renew()

    def renew(self) -> None:
        """Allow downloads, for a server that starts."""
        self._is_stopping = False

    def stop(self) -> None:
        """Reject downloads, and end the reports of the present one; it ends with the process."""
        self._is_stopping = True

    def settle(self) -> None:
        """Call `on_success` if a download has succeeded since the last call."""
        pull = self._pull
        if pull is not None and not self._is_told and not pull.is_running:
            if pull.failure is None and not pull.is_cancelled:
                self._on_success(pull.name)
            self._is_told = True

    def cancel(self) -> dict[str, str]:
        """Cancel the present download, and return its name.

        Raises
        ------
        Problem
            404: nothing is being downloaded.
        """
        pull = self._pull
        if pull is None or not pull.is_running:
            raise Problem(404, "nothing is being downloaded")
        pull.cancel()
        return {"status": "cancelled", "model": pull.name}

    async def reports(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Download a model, and yield the progress as Ollama's `/api/pull` has it.

        A client that asks for the model which is being downloaded gets the same progress.

        Raises
        ------
        Problem
            400: this is not a name; 409: another model is being downloaded, or the download was cancelled; 502: it
            failed; 503: the server is shutting down.
        """
        pull = self._begun(_model_of(name))
        yield {"status": "pulling manifest"}
        before: dict[str, Any] = {}
        while pull.is_running:
            self._check()
            if (download := pull.download) is not None:
                report = {
                    "status": f"pulling {pull.name}",
                    "digest": f"sha256:{download.sha256}",
                    "total": download.n_bytes,
                    "completed": await anyio.to_thread.run_sync(download.count),
                }
                if report != before:
                    yield report
                before = report
            await anyio.sleep(PAUSE_S)
        if pull.is_cancelled:
            raise Problem(
                409, f"the download of {pull.name} was cancelled; ask again to continue it"
            )
        if pull.failure is not None:
            raise Problem(502, pull.failure)
        self.settle()
        yield {"status": "success", "model": pull.name}

    def _begun(self, model: ModelName) -> Pull:
        self._check()
        self.settle()
        pull = self._pull
        if pull is None or not pull.is_running:
            pull = self._pull = Pull(model)
            self._is_told = False
        elif pull.name != str(model):
            raise Problem(409, f"{pull.name} is being downloaded; try again when that has ended")
        return pull

    def _check(self) -> None:
        if self._is_stopping:
            raise shutting_down()


def is_same_model(name: str, configured: str | Path | None) -> bool:
    """Return True if a name or path means the configured model, also if that is given by its file in the cache."""
    if not is_name(name):
        return name == str(configured)
    with suppress(CllmError):
        files = cached_files(parse_name(name)) or []
        same = {_without_commit(path) for path in (*files[:1], Path(str(configured)))}
        return str(configured) == name or (bool(files) and len(same) == 1)
    return False


def _without_commit(path: Path) -> str:
    """Return the path of a file of the cache, the same for all versions of the file."""
    return _COMMIT.sub("/snapshots/*/", path.as_posix())


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
