"""Preflight: a model is tried in another process before this one loads it.

A damaged file can end the process that loads it, or keep it busy for ever.  `preflight_child` runs
an engine with the same settings for a few tokens, so that what is tried is what will be done; only
its context is small.

One thread runs a preflight and waits for it; it need not have an event loop, and must not be that
of one.  The process ends with it, whatever happens, and when this process does.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import logging
import math
import re
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from cllm.bindings import find_library
from cllm.engine.child_process import (
    TooSlowError,
    child_command,
    child_environment,
    how_ended,
    read_until,
)
from cllm.engine.config import UNSEEN, EngineConfig
from cllm.engine.llama import preflight_cache
from cllm.errors import ClosedError, ModelLoadError

logger: logging.Logger = logging.getLogger("cllm.engine")

HELPER = "cllm.engine.preflight_child"
# Longer than this and it hangs: so many seconds, and those that a slow disk needs for the files.
TIME_LIMIT_S = 120.0
SLOW_BYTES_PER_S = 50e6
EXIT_S = 5.0  # to be gone, once its output is closed
ORPHAN_S = 10  # by which a process without parent may outlive the limit
LOADED = b"\nloaded\n"  # what the process says then
N_CTX = 512
MAX_OUTPUT_BYTES = 1 << 16
MAX_WORDS = 300

_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


class Preflight:
    """Tries one model, if its settings say so.

    Parameters
    ----------
    config : EngineConfig
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._files: preflight_cache.Fingerprints = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False
        self._ended = False  # the last process, by a signal, after it had loaded the model

    def run(self) -> None:
        """Return if the model may be loaded here.

        Raises
        ------
        ModelLoadError
            The process was killed, refused the model, or did not come back; the reason says which.
        LibraryError
            There is no library to try it with.
        ClosedError
            `stop` was called.
        """
        config = self._config
        if not config.preflight:
            return
        _, record = find_library()
        build = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
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
        """Return the value of `kv_unified` with which no process ends; None if there is none."""
        for layout in (True, False):
            if self._config.kv_unified == layout or (layout and self._config.deterministic):
                continue
            with suppress(ModelLoadError):
                self._try(dataclasses.replace(self._config, kv_unified=layout))
                return layout
        return None

    def passed(self) -> None:
        """Remember that the model passed, if the settings ask for that."""
        if self._config.preflight == UNSEEN and self._files:
            preflight_cache.remember(self._files)

    def stop(self) -> None:
        """End the process, and let no other try the model: `run` raises `ClosedError`.  Any thread; returns at once."""
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
                process_group=0,
            )
        except OSError as error:
            raise ModelLoadError(path, f"cannot start the process that tries it: {error}") from None
        with process:
            try:
                self._process = process
                if self._is_stopped:  # perhaps since a moment ago: looked at last
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
            raise ModelLoadError(path, f"a process with it does not end within {limit_s:.1f} s")
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
        self._process = None  # about to be waited for: its number may be another's then
        try:
            process.wait(0 if output is None else EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return None
        return output


def model_files(config: EngineConfig) -> list[Path]:
    """Every file that answers depend on: the model, all parts of a split one, the adapters."""
    files = [config.model_path, *(Path(lora.path) for lora in config.loras)]
    if (split := _SPLIT.fullmatch(config.model_path.name)) is not None:
        name, n_parts = split.groups()
        parts = f"{glob.escape(name)}-?????-of-{n_parts}.gguf"
        files += sorted(config.model_path.parent.glob(parts))
    return files


def other_files(config: EngineConfig) -> list[Path]:
    """The models that draft, and that compute texts, if there are some."""
    given = (config.draft_model, config.embedding_model)
    return [Path(path) for path in given if path is not None]


def _is_embedded(config: EngineConfig) -> bool:
    """Return True if every file to load comes with cllm."""
    return config.model is None and not (config.lora or other_files(config))


def _settings_line(config: EngineConfig) -> bytes:
    """The settings of the engine in the other process: as here, but for one short request."""
    small = dataclasses.replace(config, preflight=False, trace=None, n_ctx=N_CTX)
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
    """Raise unless the process said that it could use the model.

    That it ended without a failure is not enough: where children are not waited for (`SIGCHLD` is
    ignored), Python takes every end for a good one.
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
