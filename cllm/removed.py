"""Names that cllm no longer has, and what replaces each: text for error messages."""

from __future__ import annotations

_SLOTS = "prefix_cache_dir (--prefix-cache-dir) keeps prefixes as files by itself"
REPLACEMENTS = {
    "allow_grammar": "raw grammars (grammar, lark) need no option",
    "resume_window": (
        "repeat a request that lost its connection with the tokens that have arrived (generated), "
        "as cllm.client does, or a chat with continue_final_message"
    ),
    "slot_save_path": _SLOTS,
    "tick_log": "trace (--trace) writes ticks for Perfetto; they cannot be replayed",
    "swap_tokens": "prefix_cache_bytes (--prefix-cache-bytes) limits states of preempted requests too",
    "save_slot": _SLOTS,
    "restore_slot": _SLOTS,
}


def replacement(name: str) -> str:
    """Return the replacement of a removed option or method; "" if the name was not removed.

    Parameters
    ----------
    name : str
        Name in Python, or option of the command line: `slot_save_path` or `--slot-save-path`.
    """
    return REPLACEMENTS.get(name.lstrip("-").replace("-", "_"), "")


# Names of `cllm.testing` that only tests of cllm itself need.
_MOVED = frozenset(
    (
        "Cancel", "FailCall", "FailDecode", "ReadOn", "ResetPrefixCache", "Schedule", "ScheduleError",
        "SimulationFailure", "SimulationReport", "Simulator", "Step", "StopReading", "Submit", "Tick",
        "Wait", "check_decoder", "random_schedule", "simulate",
    )
)  # fmt: skip


def moved_to_tests(name: str) -> str:
    """Return the new place of a name of `cllm.testing`, as the end of a sentence; "" if it has not moved."""
    return ": it is in tests.simulation of cllm's source" if name in _MOVED else ""
