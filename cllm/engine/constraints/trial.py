"""ConstraintTrial: constraints are compiled and followed a while in another process first.

A few bytes of GBNF can hang llama.cpp, exhaust the memory or end the process, and `multipleOf` a
large number does that to llguidance.  `gbnf` refuses what can be seen in a grammar; the rest is seen
here, by `llama.trial_child`, at the cost of that process.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import weakref
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from cllm.engine.child_process import child_command, child_environment
from cllm.engine.constraint import NotAvailableError
from cllm.errors import ClosedError, InvalidRequestError

HELPER = "cllm.engine.llama.trial_child"
START_S = 60.0
TRIAL_S = 2.0
EXIT_S = 1.0
MEMORY_BYTES = 512 << 20
MAX_VERDICTS = 256
MAX_ANSWER_BYTES = 1 << 16

TOO_SLOW = f"one that can be followed a while within {TRIAL_S:g} s"
FATAL = f"one that can be followed within {MEMORY_BYTES >> 20} MiB and without ending the process"

# What reading from and writing to a process that has ended can raise, on either event loop.
_GONE = (
    anyio.EndOfStream,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.IncompleteRead,
    OSError,
)


class ConstraintTrial:
    """Tries constraints, one at a time, in a process that is started when it is first needed.

    Event loop only.  A verdict is remembered.

    Parameters
    ----------
    model_path : str
        Whose vocabulary counts.
    kind : str
        Who follows them: "llama.cpp" (`grammar`) or "llguidance" (`json_schema`, `regex`).
    """

    def __init__(self, model_path: str, kind: str = "llama.cpp") -> None:
        self._kind = kind
        self._model_path = str(Path(model_path).absolute())
        self._lock = anyio.Lock()
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._process: Process | None = None
        self._answers: BufferedByteReceiveStream | None = None
        self._is_killed = False
        self._closed = False

    async def run(self, text: str, field: str = "grammar") -> None:
        """Return if the constraint can be used.

        The two seconds that a trial may take begin when the process is ready for it.  If the
        caller is cancelled, the process is ended and the next caller starts another.

        Raises
        ------
        InvalidRequestError
            It cannot; the limit says why.
        NotAvailableError
            The process did not start.
        ClosedError
        """
        key = _key(text, field)
        if key not in self._verdicts:
            async with self._lock:
                if self._closed:
                    raise ClosedError("the engine is closed")
                if key not in self._verdicts:
                    verdict = await self._try(field, text)
                    if verdict in (TOO_SLOW, FATAL):
                        # Perhaps this process was busy, or another one short of memory: not for ever.
                        raise InvalidRequestError(field, text[:60], verdict)
                    self._verdicts[key] = verdict
        self._verdicts.move_to_end(key)
        verdict = self._verdicts[key]
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        if verdict is not None:
            raise InvalidRequestError(field, text[:60], verdict)

    def knows(self, text: str, field: str = "grammar") -> bool:
        """Whether the verdict is remembered."""
        return _key(text, field) in self._verdicts

    async def aclose(self) -> None:
        """End the process and wait for that; a trial that runs raises `ClosedError`."""
        self._closed = True
        self._kill()  # a trial that runs sees its end
        with anyio.CancelScope(shield=True):
            async with self._lock:
                await self._end()

    async def _try(self, field: str, text: str) -> str | None:
        """The verdict of the process, or of its end."""
        if self._process is not None and self._process.returncode is not None:
            await self._end()
        if self._process is None:
            await self._start()
        answer = None
        try:
            with anyio.move_on_after(TRIAL_S):
                answer = await self._ask(json.dumps({"field": field, "text": text}))
            return TOO_SLOW if answer is None else answer["error"]
        except _GONE:
            await self._see_its_end()
            if self._closed:
                raise ClosedError("the engine was closed") from None
            return FATAL
        finally:
            # Without an answer, of which it may still be thinking: the next one would get it.
            if answer is None:
                await self._end()

    async def _start(self) -> None:
        """A process that is ready."""
        reason, is_ready = f"not ready within {START_S:g} s", False
        try:
            # A process that was begun but not returned could not be ended.
            with anyio.CancelScope(shield=True):
                process = self._process = await anyio.open_process(
                    child_command(HELPER, self._kind, self._model_path, str(MEMORY_BYTES)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=child_environment(),
                    start_new_session=True,
                )
            self._is_killed = False
            self._finalizer = weakref.finalize(self, _kill_leaked, process)
            assert process.stdout is not None
            self._answers = BufferedByteReceiveStream(process.stdout)
            if not self._closed:  # since: `aclose` had no process to kill
                with anyio.move_on_after(START_S):
                    reason = (await self._answer())["error"] or ""
                    is_ready = not reason and not self._closed
        except _GONE as error:
            await self._see_its_end()
            reason = str(error) if isinstance(error, OSError) else "it ended"
        finally:
            if not is_ready:
                await self._end()
        if self._closed:
            raise ClosedError("the engine was closed")
        if not is_ready:
            raise NotAvailableError(f"cannot start the process that tries constraints: {reason}")

    async def _ask(self, request: str) -> dict[str, str | None]:
        assert self._process is not None
        assert self._process.stdin is not None
        await self._process.stdin.send(request.encode() + b"\n")
        return await self._answer()

    async def _answer(self) -> dict[str, str | None]:
        assert self._answers is not None
        line = await self._answers.receive_until(b"\n", MAX_ANSWER_BYTES)
        answer: dict[str, str | None] = json.loads(line)
        return answer

    def _kill(self) -> None:
        """Once: asyncio complains of losing the exit status where the process has ended already."""
        process = self._process
        if process is not None and process.returncode is None and not self._is_killed:
            self._is_killed = True
            with suppress(ProcessLookupError):
                process.kill()

    async def _see_its_end(self) -> None:
        """Wait for a process that has closed its output: `_kill` need not do what was done."""
        if self._process is not None:
            with anyio.move_on_after(EXIT_S, shield=True):
                await self._process.wait()

    async def _end(self) -> None:
        """End the process, if there is one, and wait for its end, which is near."""
        self._kill()
        process, self._process, self._answers = self._process, None, None
        if process is not None:
            self._finalizer.detach()
            with anyio.CancelScope(shield=True):
                await process.aclose()


def _kill_leaked(process: Process) -> None:
    """Its trial was collected without `aclose`; an event loop may keep its pipes open."""
    with suppress(ProcessLookupError, RuntimeError):  # the loop may be closed
        process.kill()


def _key(text: str, field: str) -> bytes:
    return hashlib.sha256(f"{field} {text}".encode("utf-8", "surrogatepass")).digest()
