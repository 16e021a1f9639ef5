"""ConstraintTrial: compile constraints, and follow them for some tokens, in another process first.

A large `multipleOf` hangs llguidance or exhausts the memory, and some constants overflow its stack.
In a trial this ends only the process of `llama.trial_child`.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from contextlib import suppress
from functools import partial

import anyio

from cllm.engine.child_process import EndedError, JsonChild, TooSlowError
from cllm.engine.constraint import NotAvailableError
from cllm.engine.file_content import FileContent
from cllm.engine.plain_values import as_plain
from cllm.engine.thread.worker_thread import WorkerThread, WorkerThreads
from cllm.errors import ClosedError, InvalidRequestError

HELPER = "cllm.engine.llama.trial_child"
TRIAL_S = 2.0
MEMORY_BYTES = 512 << 20
MAX_VERDICTS = 256

TOO_SLOW = f"one that can be followed a while within {TRIAL_S:g} s"
FATAL = f"one that can be followed within {MEMORY_BYTES >> 20} MiB and without ending the process"


class ConstraintTrial:
    """Tries constraints, one at a time, in a process that is started when it is first needed.

    Event loop only.  The last 256 verdicts are remembered, but no timeout and no crash.

    Parameters
    ----------
    model : FileContent
        The model; constraints are tried with its vocabulary.
    workers : WorkerThreads
        Starts the thread that waits for the process, at the first trial.
    """

    def __init__(self, model: FileContent, workers: WorkerThreads) -> None:
        given = json.dumps(as_plain(model))
        self._child = JsonChild(HELPER, given, str(MEMORY_BYTES))
        self._lock = anyio.Lock()
        self._workers = workers
        self._worker: WorkerThread | None = None
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._closed = False

    async def run(self, field: str, text: str) -> None:
        """Try a constraint; raise an error if it cannot be used.

        A trial may take 2 s from the time when the process is ready.  If the caller is cancelled, the
        process is ended and the next caller starts another.

        Raises
        ------
        InvalidRequestError
            The constraint cannot be used; `limit` has the reason.
        NotAvailableError
            The process did not start.
        ClosedError
        """
        key = hashlib.sha256(f"{field} {text}".encode("utf-8", "surrogatepass")).digest()
        if key not in self._verdicts:
            async with self._lock:
                if self._closed:
                    raise ClosedError("the engine is closed")
                if key not in self._verdicts:
                    verdict = await self._try(field, text)
                    if verdict in (TOO_SLOW, FATAL):
                        # Not remembered: the machine may have been busy, or short of memory.
                        raise InvalidRequestError(field, text[:60], verdict)
                    self._verdicts[key] = verdict
        self._verdicts.move_to_end(key)
        verdict = self._verdicts[key]
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        if verdict is not None:
            raise InvalidRequestError(field, text[:60], verdict)

    async def aclose(self) -> None:
        """End the process and wait for its end; a running trial raises `ClosedError`."""
        self._closed = True
        self._child.stop()
        if self._worker is not None:
            with anyio.CancelScope(shield=True):
                try:
                    await self._worker.run(self._child.close)
                except ClosedError:  # the thread has ended, and with it every trial
                    self._child.close()

    async def _try(self, field: str, text: str) -> str | None:
        """Return why the constraint cannot be used: the answer, a timeout or a crash; None if it can."""
        if self._worker is None:
            self._worker = self._workers.start("cllm-trial")
            self._workers.end_first(self._child.stop)
        request = {"field": field, "text": text}
        try:
            answer = await self._worker.run(partial(self._child.ask, request, TRIAL_S))
        except TooSlowError:
            return TOO_SLOW
        except EndedError:
            return FATAL
        except OSError as error:
            why = f"cannot start the process that tries constraints: {error}"
            raise NotAvailableError(why) from None
        except anyio.get_cancelled_exc_class():
            self._child.interrupt()
            with anyio.CancelScope(shield=True), suppress(ClosedError):
                await self._worker.run(self._child.end)
            raise
        error_text: str | None = answer["error"]
        return error_text
