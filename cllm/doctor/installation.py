"""Checks of what is installed: the library, how it was built, and this machine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cllm.bindings import Device, devices, find_library, library, system_info
from cllm.bindings._llama_h import LLAMA_CPP_COMMIT, LLAMA_CPP_VERSION
from cllm.doctor.findings import Check, Status
from cllm.errors import AbiMismatchError, LibraryError
from cllm.memory import available_bytes
from cllm.processors import cpu_name
from cllm.system import lockable_bytes

MIB = 1 << 20
# Texts for the values of `amx` (Intel's matrix tiles) in the record of `build_llama.sh`.
_AMX_TEXT = {
    "absent": "this CPU has none",
    "disabled": "left out: the build is portable",
    "works": "works, and is used",
    "faults": "listed by the CPU but faults here, so it was built without",
}
_NO_AMX = "-mno-amx-tile"


def installation_checks() -> Iterator[Check]:
    """Yield checks of the library and the machine; the last one fails if there is no library."""
    try:
        loaded = library()
    except AbiMismatchError as error:
        yield Check("declarations", Status.FAILED, str(error))
        return
    except (LibraryError, OSError) as error:
        yield Check("library", Status.FAILED, str(error))
        return
    record = loaded.record
    yield Check("library", Status.OK, str(loaded.path))
    yield check_version(record, loaded.llama_version().decode())
    yield check_build(record)
    yield check_cpu(record, cpu_name(), system_info(), loaded.cpu_backend().name)
    yield check_gpus(devices(), loaded.unloaded_backends())
    if "amx" in record:
        yield check_amx(record)


def check_gpus(found: Sequence[Device], unloaded: Iterable[tuple[Path, str]] = ()) -> Check:
    """Report the usable GPUs with their memory, and the GPU backends that could not be loaded, with the reason."""
    gpus = [
        f"{gpu.name}: {gpu.description}, {gpu.n_free_bytes / MIB:,.0f} of {gpu.n_total_bytes / MIB:,.0f} MiB free"
        for gpu in found
        if gpu.is_gpu
    ]
    told = "; ".join(gpus) or "none that this library can use"
    for path, reason in unloaded:
        told += f"; {path.name} is not loaded: {reason}"
    return Check("GPU", Status.OK, told)


def llama_version() -> str:
    """Return a text with commit, target CPU and path of libllama, without loading it, or that there is none."""
    try:
        path, record = find_library()
    except LibraryError:
        return "no llama.cpp that it can use (cllm doctor says why)"
    return f"llama.cpp {record.get('commit')} for {'any CPU' if record.get('portable') else 'this CPU'}, {path}"


def check_version(record: dict[str, Any], version: str) -> Check:
    """Compare the commit of llama.cpp with the one that the tests run with; another one is a warning.

    The version is only for the text.  A library that does not match the declarations is not loaded at all:
    see `AbiMismatchError`.
    """
    commit = record.get("commit")
    told = f"llama.cpp {commit} ({record.get('version', version)})"
    if commit == LLAMA_CPP_COMMIT:
        return Check("declarations", Status.OK, f"{told}, which the tests run with")
    own, tested = (_numbers(each) for each in (version, LLAMA_CPP_VERSION))
    how = "newer" if own > tested else "older" if own < tested else "another"
    than = f"than tested ({LLAMA_CPP_COMMIT}, {LLAMA_CPP_VERSION}); it fits the declarations"
    return Check("declarations", Status.WARNING, f"{told}, {how} {than}")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def check_build(record: dict[str, Any]) -> Check:
    """Report how the library was built; sanitizers or a debug build are a warning, because they are slow."""
    flags = [str(flag) for flag in record.get("flags", [])]
    kind = next(
        (f.partition("=")[2] for f in flags if f.startswith("-DCMAKE_BUILD_TYPE=")), "unknown"
    )
    parts = [
        kind,
        "portable" if record.get("portable") else "native",
        f"backends {', '.join(record.get('backends', ['unknown']))}",
        str(record.get("compiler", "unknown compiler")),
        f"of {record.get('built_at', 'an unknown date')}",
    ]
    if record.get("sanitize"):
        return Check("build", Status.WARNING, "with sanitizers (slow): " + ", ".join(parts))
    if kind == "Debug":
        return Check("build", Status.WARNING, "without optimization (slow): " + ", ".join(parts))
    return Check("build", Status.OK, ", ".join(parts))


def check_cpu(record: dict[str, Any], cpu: str, features: str, backend: str) -> Check:
    """Check which features of the CPU the library uses, and that it was built for this CPU.

    Parameters
    ----------
    record : dict
        Record that `build_llama.sh` wrote.
    cpu : str
        Name of this machine's CPU; empty if it is unknown.
    features : str
        Text of `system_info`.
    backend : str
        Name of the file with the code for this CPU, such as "libggml-cpu-haswell.so".
    """
    pairs = (part.rpartition(":")[2].partition("=") for part in features.split("|"))
    used = " ".join(name.strip() for name, _, value in pairs if value.strip() == "1")
    built_for = str(record.get("cpu", ""))
    if cpu and built_for and cpu not in built_for and not record.get("portable"):
        return Check(
            "CPU",
            Status.WARNING,
            f"the library was built for {built_for}, this is {cpu}: an instruction may be missing "
            f"({used})",
        )
    text = f"{cpu or 'unknown'}: {used or 'no features named'}"
    if variant := backend.removeprefix("libggml-cpu").partition(".")[0].removeprefix("-"):
        text += f" (the variant {variant} of a portable library)"
    return Check("CPU", Status.OK, text)


def check_amx(record: dict[str, Any]) -> Check:
    """Report the result of the build's test of Intel's matrix tiles; failed if they are used but fault."""
    verdict = str(record["amx"])
    text = _AMX_TEXT.get(verdict, verdict)
    if verdict == "faults" and not any(_NO_AMX in str(f) for f in record.get("flags", [])):
        return Check("AMX", Status.FAILED, "faults here, and the library was built with it")
    return Check("AMX", Status.OK, text)


def memory_check(model_bytes: int) -> Check:
    """Check that the weights fit into free memory, and report how much may be locked.

    Parameters
    ----------
    model_bytes : int
        Size of the weights.
    """
    n_bytes = lockable_bytes()
    may_lock = "an unknown part"
    if n_bytes is not None:
        may_lock = "all" if n_bytes == math.inf else f"{n_bytes / MIB:,.0f} MiB"
    return check_memory(model_bytes, available_bytes(), may_lock)


def check_memory(model_bytes: int, available_bytes: int | None, may_lock: str) -> Check:
    """Compare weights with free memory (None: unknown); `may_lock` is the limit of locked memory as text."""
    text = f"{model_bytes / MIB:,.1f} MiB of weights"
    if available_bytes is None:
        return Check("memory", Status.OK, f"{text}; {may_lock} may be locked (use_mlock)")
    text += f", {available_bytes / MIB:,.0f} MiB available; {may_lock} may be locked (use_mlock)"
    if model_bytes > available_bytes:
        return Check("memory", Status.WARNING, f"{text}: weights will be read again and again")
    return Check("memory", Status.OK, text)
