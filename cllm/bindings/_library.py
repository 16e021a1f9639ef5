"""Find, load and initialise libllama, once per process, on first use.

Nothing happens at import.  `library()` looks for the library (`CLLM_LIBRARY`, then the one that
`build_llama.sh` linked or the wheel carries).  It lays out llama.cpp's structures as that library has
them, and forwards llama.cpp's log to the `cllm.llama` logger.

The log callback only appends to a deque: it may run on any thread, inside any native lock, so it
must not take one.  `forward_log` emits the lines, on the thread that made the call.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cllm.bindings import _llama_h as h
from cllm.bindings._functions import Functions
from cllm.bindings._layout import layouts_of, record_of
from cllm.errors import LibraryError, LibraryNotFoundError
from cllm.log_once import log_level
from cllm.shared_libraries import c_library, file_of, library_file
from cllm.system import call_in_forks

logger = logging.getLogger("cllm.llama")

NATIVE_DIRECTORY = Path(__file__).parent.parent / "_native"

_LOGGING_LEVEL: dict[int, int] = {
    h.LogLevel.DEBUG: logging.DEBUG,
    h.LogLevel.INFO: logging.INFO,
    h.LogLevel.WARN: logging.WARNING,
    h.LogLevel.ERROR: logging.ERROR,
}
GPUS = (h.DeviceType.GPU, h.DeviceType.IGPU)
SPIN_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
N_SPINS = "10000"
# Part of a file's name (libggml-cuda.so), and the name under which ggml registers the backend.
GPU_BACKENDS = {"cuda": b"CUDA", "hip": b"ROCm", "metal": b"MTL", "vulkan": b"Vulkan"}
RPC = b"RPC"  # the backend whose devices are in other machines
N_ERRORS_MAX = 4  # reported errors of one call: the first is the cause, the next are consequences
# Enough for a model load at debug level; when full, the oldest lines go.
_log_lines: collections.deque[tuple[int, str]] = collections.deque(maxlen=10_000)
_captured: dict[int, list[str]] = {}  # by thread
_library: Library | None = None
# Two engines may start at once, each on its own thread; llama.cpp's initialisation is not thread-safe.
_library_lock = threading.Lock()


def _on_fork() -> None:
    """Replace the lock in a forked child: another thread may have held it during the fork."""
    global _library_lock
    _library_lock = threading.Lock()


call_in_forks(_on_fork)


class Library(Functions):
    """The functions of libllama as attributes, with the signatures of `_llama_h`.

    Attributes
    ----------
    record : dict
        Build record: `build.json` of `build_llama.sh`, or the entry of a known library; else empty.
    n_computed : int
        Number of batches and images that this process has computed, or tried to.
    """

    declared = h.DECLARATIONS

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.record = record
        self.n_computed: int = 0
        super().__init__(path, path)
        # libc's `strlen` over a two-byte flag is a `bool (*)(void *)` that costs nothing: the
        # abort callback runs after every graph node, where a Python function would need the GIL.
        abort_type = h.DECLARATIONS.callbacks["ggml_abort_callback"]
        self.read_flag: Any = ctypes.cast(c_library().strlen, abort_type)
        self.can_abort: bool = not self.read_flag(b"\0\0") and bool(self.read_flag(b"\1\0"))
        log_type = h.DECLARATIONS.callbacks["ggml_log_callback"]
        self._log_callback = log_type(_on_log)  # kept alive as long as the library may call it
        self._no_log = log_type()

    def _lacks(self, name: str) -> None:
        if name == "llama_max_parallel_sequences":
            setattr(self, name, lambda: h.LLAMA_MAX_SEQ)
        else:
            super()._lacks(name)

    def start(self) -> None:
        """Take over the log, and load and initialise the backends.

        Raises
        ------
        LibraryError
            No backend runs on this machine's CPU.
        """
        self.llama_log_set(self._log_callback, None)
        atexit.register(self.llama_log_set, self._no_log, None)
        if not self.ggml_backend_dev_count():
            # A portable library has a backend file for each kind of CPU, and ggml takes the best.  Without
            # this directory, ggml would look for them in the working directory too.
            self.ggml_backend_load_all_from_path(os.fsencode(self.path.parent))
        self.llama_backend_init()
        forward_log()
        if not self.ggml_backend_dev_count():
            raise LibraryError(f"no backend in {self.path.parent} runs on this machine's CPU")

    @property
    def has_gpu(self) -> bool:
        """True if this machine has a GPU that the library can use.

        `llama_supports_gpu_offload` is not used: for a build with RPC it is true on every machine.
        """
        devices = map(self.ggml_backend_dev_get, range(self.ggml_backend_dev_count()))
        return any(map(self._is_gpu_here, devices))

    def _is_gpu_here(self, device: Any) -> bool:
        backend = self.ggml_backend_dev_backend_reg(device)
        is_here = self.ggml_backend_reg_name(backend) != RPC
        return is_here and self.ggml_backend_dev_type(device) in GPUS

    def unloaded_backends(self) -> Iterator[tuple[Path, str]]:
        """Yield path and reason of each GPU backend beside the library that ggml could not load."""
        for name, backend in GPU_BACKENDS.items():
            for path in self.path.parent.glob(f"*ggml-{name}.*"):
                if self.ggml_backend_reg_by_name(backend):
                    continue
                try:
                    ctypes.CDLL(str(path))
                except OSError as error:
                    yield path, str(error)
                else:
                    yield path, "it finds no driver that it can use"

    def check_rpc(self) -> None:
        """Raise an error if the library has no RPC.

        Raises
        ------
        LibraryError
            This library was built without it.
        """
        if not self.ggml_backend_reg_by_name(RPC):
            hint = "build it with ./build_llama.sh --rpc"
            raise LibraryError(f"{self.path} has no RPC, which rpc needs: {hint}")

    def add_rpc_server(self, endpoint: str) -> bool:
        """Register the devices of an RPC server for models that are loaded later; return False if it has none.

        The connection stays open until this process ends.  If no server answers, llama.cpp aborts the
        process.  If the server has another client, the call waits without limit.

        Parameters
        ----------
        endpoint : str
            `HOST:PORT`.

        Raises
        ------
        LibraryError
            This library was built without RPC.
        """
        self.check_rpc()
        rpc = self.ggml_backend_reg_by_name(RPC)
        function = self.ggml_backend_reg_get_proc_address(rpc, b"ggml_backend_rpc_add_server")
        kind = ctypes.CFUNCTYPE(self.ggml_backend_reg_by_name.restype, ctypes.c_char_p)
        server = kind(function)(endpoint.encode())
        if server:
            self.ggml_backend_register(server)
            # The initialized device keeps the connection open for the life of this process.  Otherwise the
            # connection would close here, and another client could take the server before the model is loaded.
            self.ggml_backend_dev_init(self.ggml_backend_reg_dev_get(server, 0), None)
        return bool(server)

    def cpu_backend(self) -> Path:
        """Return the file with the code that computes on the CPU; in a portable library, the backend in use."""
        cpu = self.ggml_backend_reg_by_name(b"CPU")
        function = self.ggml_backend_reg_get_proc_address(cpu, b"ggml_backend_set_n_threads")
        return file_of(function)


def library() -> Library:
    """Return the loaded libllama; the first call loads it.  Any thread.

    Raises
    ------
    LibraryNotFoundError
        No library at `CLLM_LIBRARY` or in the package.
    AbiMismatchError
        The library was not compared with the declarations in `_llama_h`, or does not fit them.
    LibraryError
        The library has no code for this machine's CPU.
    """
    return _library or _load_once()


def _load_once() -> Library:
    global _library
    with _library_lock:
        if _library is None:
            _configure_logging()
            path, record = find_library()
            # An abort would otherwise fork a debugger onto this process to print a backtrace.
            os.environ.setdefault("GGML_NO_BACKTRACE", "1")
            with _short_spins():
                loaded = Library(path, record)
                loaded.start()
            _library = loaded
        return _library


@contextmanager
def _short_spins() -> Iterator[None]:
    """Set GOMP_SPINCOUNT to 10,000 while libllama and its OpenMP runtime are loaded.

    Waiting threads spin so often before they sleep.  GNU's default of 300,000 keeps a processor busy
    for about 15 ms, which another compute thread may need.  A setting of the user stays, and programs
    that are started later do not inherit this value.
    """
    if any(name in os.environ for name in SPIN_SETTINGS):
        yield
        return
    os.environ[SPIN_SETTINGS[0]] = N_SPINS
    try:
        yield
    finally:
        del os.environ[SPIN_SETTINGS[0]]


def find_library() -> tuple[Path, dict[str, Any]]:
    """Return the path of the file that `library()` loads, and its build record; the file is not loaded.

    Raises
    ------
    LibraryNotFoundError
    AbiMismatchError
    """
    path = _find()
    layouts_of(path, h.DECLARATIONS)
    return path, record_of(path)


def forward_log(*, no_warning: str = "") -> str:
    """Send the collected log lines to `logging`; return the first 4 distinct errors, joined by semicolons.

    Parameters
    ----------
    no_warning : str
        Text of an expected warning.  Warnings that contain it are logged at the level INFO.
    """
    errors: dict[str, None] = {}
    level = logging.INFO
    while True:
        try:
            native_level, text = _log_lines.popleft()
        except IndexError:  # another thread may have taken the last one
            break
        if native_level != h.LogLevel.CONT:
            level = _LOGGING_LEVEL.get(native_level, logging.INFO)
        text = text.rstrip("\n")
        if level >= logging.ERROR and text:
            errors.setdefault(text)
        if text.strip(". "):
            is_meant = level == logging.WARNING and bool(no_warning) and no_warning in text
            logger.log(logging.INFO if is_meant else level, "%s", text)
    return "; ".join(list(errors)[:N_ERRORS_MAX])


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect the lines that libllama logs in this thread.  They reach `logging` as well."""
    lines = _captured[threading.get_ident()] = []
    try:
        yield lines
    finally:
        del _captured[threading.get_ident()]


def _on_log(level: int, text: bytes | None, _user_data: Any) -> None:
    line = (text or b"").decode("utf-8", "replace")
    _log_lines.append((level, line))
    if _captured and (lines := _captured.get(threading.get_ident())) is not None:
        lines.append(line)


def _find() -> Path:
    override = os.environ.get("CLLM_LIBRARY")
    name = library_file("llama")
    if override:
        folder = Path(override)
        candidates = [
            folder,
            folder / name,
            folder / "lib" / name,
            *sorted(folder.glob("libllama.*.so")),
        ]
    else:
        candidates = [NATIVE_DIRECTORY / "lib" / name]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    looked = ", ".join(str(candidate) for candidate in candidates)
    advice = "CLLM_LIBRARY points nowhere" if override else "run ./build_llama.sh"
    raise LibraryNotFoundError(f"no libllama found ({looked}); {advice}")


def _configure_logging() -> None:
    """Honour `CLLM_LOG_LEVEL`; without it the application's own configuration decides."""
    root = logging.getLogger("cllm")
    # A library does not write to stderr on its own account.
    root.addHandler(logging.NullHandler())
    if (level := log_level()) is None:
        return
    root.setLevel(level)
    if len(root.handlers) == 1 and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
