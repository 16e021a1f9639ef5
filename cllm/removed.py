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
    "save_slot": _SLOTS,
    "restore_slot": _SLOTS,
}


def replacement(name: str) -> str:
    """Return what replaces a removed option or method; "" if the name was not removed.

    Parameters
    ----------
    name : str
        As in Python, or as an option of the command line.
    """
    return REPLACEMENTS.get(name.lstrip("-").replace("-", "_"), "")
