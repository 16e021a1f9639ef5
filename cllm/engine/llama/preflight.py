"""Preflight: a model is tried in another process before this one loads it.

A damaged file can end or hang the process that loads it.  `preflight_child` runs an engine with the
same settings for a few tokens; only its context is small.

A preflight blocks the calling thread, which must not be the thread of an event loop.  The child process
ends with the preflight, even if an error is raised, and when this process ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from cllm.bindings import find_library
from cllm.engine.child_process import (
    OWN_GROUP,
    TooSlowError,
    child_command,
    child_environment,
    how_ended,
    read_until,
)
from cllm.engine.config import MTP, UNSEEN, EngineConfig
from cllm.engine.llama import preflight_cache
from cllm.engine.llama.gguf_header import model_parts
from cllm.errors import ClosedError, ModelLoadError

logger: logging.Logger = logging.getLogger("cllm.engine")

HELPER = "cllm.engine.preflight_child"
# A process that takes longer is taken to hang: a fixed time, and the time of a slow disk for the files.
TIME_LIMIT_S = 120.0
SLOW_BYTES_PER_S = 50e6
EXIT_S = 5.0  # for the process to end after its output was closed
ORPHAN_S = 10  # added to the limit after which a process without a parent ends itself
LOADED = b"\nloaded\n"  # output of the process when the model is loaded
N_CTX = 512
N_CTX_IMAGE = 4096  # room for a small image or a second of audio of every projector
MAX_OUTPUT_BYTES = 1 << 16
MAX_WORDS = 300


class Preflight:
    """Tries one model in a child process, if `EngineConfig.preflight` asks for it.

    Parameters
    ----------
    config : EngineConfig
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._files: preflight_cache.Fingerprints = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self._ended = False  # True if a signal ended the last process after the model was loaded

    def run(self) -> None:
        """Try the model, unless the settings or earlier preflights make that unnecessary.

        Raises
        ------
        ModelLoadError
            The process could not start, was killed, rejected the model, or hung; the reason says which.
        LibraryError
            No libllama was found.
        ClosedError
            `stop` was called.
        """
        config = self._config
        if not config.preflight:
            return
        _, record = find_library()
        # A layer for multi-token prediction is other code of llama.cpp.
        tried = json.dumps(record, sort_keys=True) + MTP * config.uses_mtp
        build = hashlib.sha256(tried.encode()).hexdigest()[:16]
        try:
            files = [*model_files(config), *other_files(config)]
            self._files = preflight_cache.fingerprints(files, build)
        except (OSError, ValueError):
            self._files = {}  # the process will say what is wrong with them
        if config.preflight == UNSEEN and (
            _is_embedded(config) or (self._files and preflight_cache.are_seen(self._files))
        ):
            self._files = {}  # nothing new to remember
            return
        logger.info("%s is tried in a process of its own first", config.model_path.name)
        try:
            self._try(config)
        except ModelLoadError as error:
            if self._ended and (other := self._layout_that_works()) is not None:
                reason = f"{error.reason} (kv_unified={other} works)"
                raise ModelLoadError(error.path, reason) from None
            raise

    def _layout_that_works(self) -> bool | None:
        """Return the value of `kv_unified` with which a preflight passes; None if none does."""
        for layout in (True, False):
            if self._config.kv_unified == layout or (layout and self._config.deterministic):
                continue
            with suppress(ModelLoadError):
                self._try(dataclasses.replace(self._config, kv_unified=layout))
                return layout
        return None

    def passed(self) -> None:
        """Remember in the cache directory that the model passed, if `preflight` is "unseen"."""
        if self._config.preflight == UNSEEN and self._files:
            preflight_cache.remember(self._files)

    def stop(self) -> None:
        """End the process; `run` raises `ClosedError`, also later.  Any thread; returns at once."""
        self._is_stopped = True
        if (process := self._process) is not None:
            process.kill()

    @property
    def _limit_s(self) -> float:
        n_bytes = sum(file.n_bytes for file in self._files.values())
        return TIME_LIMIT_S + n_bytes / SLOW_BYTES_PER_S

    def _try(self, config: EngineConfig) -> None:
        path, limit_s = str(config.model_path), self._limit_s
        self._ended = False
        try:
            process = subprocess.Popen(
                child_command(HELPER, str(math.ceil(limit_s) + ORPHAN_S)),
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=child_environment(),
                **OWN_GROUP,
            )
        except OSError as error:
            raise ModelLoadError(path, f"cannot start the process that tries it: {error}") from None
        with process:
            try:
                self._process = process
                if self._is_stopped:  # checked last: `stop` may have been called meanwhile
                    process.kill()
                output = self._converse(process, config, limit_s)
            except BaseException:
                process.kill()
                raise
            finally:
                self._process = None
        if self._is_stopped:
            raise ClosedError("the engine was closed")
        if output is None:
            raise ModelLoadError(
                path,
                f"its preflight hung or was too slow (limit {limit_s:.1f} s), and was ended; preflight=False skips it",
            )
        self._ended = process.returncode < 0 and LOADED in output
        _check(output, process.returncode, path)

    def _converse(
        self, process: subprocess.Popen[bytes], config: EngineConfig, limit_s: float
    ) -> bytes | None:
        """Send the settings to the process, wait for its end, and return its report; None if it hangs."""
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + limit_s
        with suppress(BrokenPipeError):  # it has ended already: its last words say why
            process.stdin.write(_settings_line(config))
        # Standard input stays open: its end tells the process that its parent is gone.
        output = _read_to_end(process.stdout, deadline)
        self._process = None  # `stop` must not kill it after `wait`: its id may be reused
        try:
            process.wait(0 if output is None else EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
        return output


def model_files(config: EngineConfig) -> list[Path]:
    """Return the files that answers depend on: the model, all parts of a split model, the adapters."""
    return [*model_parts(config.model_path), *(Path(lora.path) for lora in config.loras)]


def other_files(config: EngineConfig) -> list[Path]:
    """Return the files of the draft model, of the embedding model and of the projector, if they are set."""
    given = (config.draft_model, config.embedding_model, config.mmproj)
    return [Path(path) for path in given if path is not None]


def _is_embedded(config: EngineConfig) -> bool:
    """Return True if every file to load comes with cllm."""
    return config.model is None and not (config.lora or other_files(config))


def _settings_line(config: EngineConfig) -> bytes:
    """Return the settings for the child process, as one line of JSON: the same, but with a small context."""
    n_ctx = N_CTX if config.mmproj is None else N_CTX_IMAGE
    small = dataclasses.replace(config, preflight=False, trace=None, n_ctx=n_ctx)
    if small.tune is not None:  # only this process measures
        small = dataclasses.replace(small, tune="cached")
    return small.to_json().encode() + b"\n"


def _read_to_end(stream: IO[bytes], deadline: float) -> bytes | None:
    """Return the last bytes before the end of the stream; None at the deadline."""
    tail = b""
    try:
        for data in read_until(stream, deadline):
            tail = (tail + data)[-MAX_OUTPUT_BYTES:]
    except TooSlowError:
        return None
    return tail


def _check(output: bytes, returncode: int, path: str) -> None:
    """Raise `ModelLoadError` unless the process reported that it could use the model.

    The exit status is not enough: if `SIGCHLD` is ignored, Python reports status 0 for every process.
    """
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines()]
    last_words = next((line for line in reversed(lines) if line), "it said nothing")
    try:
        answer = json.loads(last_words)
        failure = answer["reason"], answer["path"]
    except (ValueError, TypeError, KeyError):
        words = last_words[:MAX_WORDS]
        how = f"the process that tried it ended with {how_ended(returncode)}: {words}"
        raise ModelLoadError(path, how) from None
    reason, of_path = failure
    if reason is not None:
        raise ModelLoadError(of_path or path, reason)
