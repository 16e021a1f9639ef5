"""Checks of the settings that say where a model's tensors are, and which processors compute.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cllm.checks import MAX_THREADS, ErrorType, check_float
from cllm.settings import texts

N_DEVICES_MAX = 16  # GGML_MAX_DEVICES: the most GPUs that llama.cpp supports
RANGE = re.compile(r"(\d{1,4})-(\d{1,4})")
MASK = re.compile(r"(?:0[xX])?([0-9a-fA-F]{1,128})")
# Names of the experts' weights of one layer, as in `LLM_FFN_EXPS_REGEX` of llama.cpp.
EXPERTS = r"blk\.{}\.ffn_(up|down|gate|gate_up)_(ch|)exps"


def device_names(name: str, given: object, error: ErrorType) -> tuple[str, ...]:
    """Return names of devices as a tuple; each may be there once."""
    names = texts(name, given, error)
    if len(names) > N_DEVICES_MAX:
        raise error(name, given, f"at most {N_DEVICES_MAX} devices")
    if len(set(names)) < len(names):
        raise error(name, given, "each device once")
    return names


def proportions(name: str, given: object, error: ErrorType) -> tuple[float, ...]:
    """Return proportions as a tuple of floats: none, or some of which one is positive."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise error(name, given, "a sequence of numbers")
    if len(given) > N_DEVICES_MAX:
        raise error(name, given, f"at most {N_DEVICES_MAX} numbers")
    shares = tuple(check_float(name, share, 0.0, 1e6, error) for share in given)
    if shares and not any(shares):
        raise error(name, given, "proportions with at least one above 0")
    return shares


def overrides(name: str, given: object, error: ErrorType) -> tuple[str, ...]:
    """Return texts PATTERN=TYPE as a tuple."""
    found = texts(name, given, error)
    for text in found:
        pattern, separator, buffer_type = text.rpartition("=")
        if not (pattern and separator and buffer_type.strip()) or "\0" in text:
            raise error(name, text, "PATTERN=TYPE: an expression for names, and a buffer type")
    return found


def processor_set(name: str, given: object, error: ErrorType) -> str:
    """Check a hexadecimal mask of processors, or a range of their numbers."""
    if not isinstance(given, str) or not processors_of(given):
        limit = f"a hexadecimal mask or FIRST-LAST, of processors 0 to {MAX_THREADS - 1}"
        raise error(name, given, limit)
    return given


def processors_of(text: str) -> frozenset[int]:
    """Return the numbers of the processors of a mask ("0xf") or a range ("0-3"); empty if it is neither."""
    if found := RANGE.fullmatch(text):
        first, last = map(int, found.groups())
        return frozenset(range(first, last + 1)) if last < MAX_THREADS else frozenset()
    if found := MASK.fullmatch(text):
        bits = int(found[1], 16)
        return frozenset(index for index in range(MAX_THREADS) if bits >> index & 1)
    return frozenset()


def override_pairs(given: Sequence[str], n_cpu_moe: int) -> tuple[tuple[str, str], ...]:
    """Return all overrides, each an expression and a buffer type; those given come first.

    Parameters
    ----------
    n_cpu_moe : int
        Layers whose experts are in host memory, from the first one on.
    """
    pairs = [text.rpartition("=") for text in given]
    return (
        *((pattern, buffer_type) for pattern, _, buffer_type in pairs),
        *((EXPERTS.format(layer), "CPU") for layer in range(n_cpu_moe)),
    )
