"""Faults of memory made on purpose in libllama and ggml: what the sanitizers have to report.

They show that the sanitizers work.  `python -m tests.reliability.memory_faults NAME` makes one fault in its
own process.  Without sanitizers the fault may have no visible effect.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass

from cllm.bindings._library import library

PAST_THE_END = 43  # GGML_TYPE_COUNT of ggml.h

ADDRESS, UNDEFINED, LEAK = "AddressSanitizer", "UndefinedBehaviorSanitizer", "LeakSanitizer"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the reports that it must cause.

    Attributes
    ----------
    make : callable
        Function that makes the fault.
    function : str
        Function of libllama or ggml in which the fault happens.
    reports : tuple
        Sanitizer and kind of each report.
    """

    make: Callable[[], None]
    function: str
    reports: tuple[tuple[str, str], ...]


def write_past_the_end() -> None:
    """Write 64 values into a buffer for 4."""
    values = ctypes.create_string_buffer(64 * ctypes.sizeof(ctypes.c_uint16))
    too_small = ctypes.create_string_buffer(4 * ctypes.sizeof(ctypes.c_float))
    n = ctypes.c_int64(64)
    _ggml().ggml_fp16_to_fp32_row(ctypes.byref(values), ctypes.byref(too_small), n)


def use_after_free() -> None:
    """Read the name of a sampler that was freed."""
    sampler = library().llama_sampler_init_greedy()
    library().llama_sampler_free(sampler)
    library().llama_sampler_name(sampler)


def index_past_the_end() -> None:
    """Read the type behind the last one: one sanitizer reports the index, AddressSanitizer the address.

    Far behind the last type there may be another object, whose address AddressSanitizer accepts.
    """
    _ggml().ggml_blck_size(PAST_THE_END)


def lose() -> None:
    """Leak a sampler: no pointer leads to it."""
    library().llama_sampler_init_dist(0)


def _ggml() -> ctypes.CDLL:
    suffix = library().path.suffix
    return ctypes.CDLL(str(library().path.with_name(f"libggml-base{suffix}")))


FAULTS = {
    "write_past_the_end": Fault(
        write_past_the_end, "ggml_fp16_to_fp32_row", ((ADDRESS, "heap-buffer-overflow"),)
    ),
    "use_after_free": Fault(
        use_after_free, "llama_sampler_name", ((ADDRESS, "heap-use-after-free"),)
    ),
    "index_past_the_end": Fault(
        index_past_the_end,
        "ggml_blck_size",
        ((UNDEFINED, f"index {PAST_THE_END} out of bounds"), (ADDRESS, "global-buffer-overflow")),
    ),
    "lose": Fault(lose, "llama_sampler_init_dist", ((LEAK, "leak"),)),
}


if __name__ == "__main__":
    FAULTS[sys.argv[1]].make()
