"""PrefixTable: who has had the longest beginning of a prompt.  Pure; one thread.

A server answers faster what begins as something that it has computed.  It is known by what was sent
there: the servers are not asked.  Load goes before that: a server with far more work than another gets no more.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cllm.checks import check_int
from cllm.errors import InvalidArgumentError

BLOCK = 256  # bytes of a prompt that are looked up at once: some 64 tokens
N_BLOCKS_MAX = 512  # of one prompt; what is behind them decides nothing
PROMPTS = ("messages", "prompt", "input")  # what bodies call it

Key = bytes


class PrefixTable:
    """Table from prefixes of prompts to the names that had them last.

    Parameters
    ----------
    n_keys_max : int
        Beginnings that are remembered; those that were not met for longest go first.
    max_lead : int
        Requests that a name may have more than another before its prefixes no longer count.

    Raises
    ------
    InvalidArgumentError
        Names the field.
    """

    def __init__(self, *, n_keys_max: int = 100_000, max_lead: int = 8) -> None:
        check_int("n_keys_max", n_keys_max, 1, 1 << 30, InvalidArgumentError)
        check_int("max_lead", max_lead, 0, 1 << 30, InvalidArgumentError)
        self._n_keys_max = n_keys_max
        self._max_lead = max_lead
        self._last: OrderedDict[Key, str] = OrderedDict()
        self._n_new: Counter[str] = (
            Counter()
        )  # blocks that each has computed: idle ones differ in it

    def __len__(self) -> int:
        """Beginnings that are known."""
        return len(self._last)

    def choose(self, keys: Sequence[Key], load: Mapping[str, int]) -> str:
        """Return the server for a prompt, and record the choice.

        Parameters
        ----------
        keys : sequence of bytes
            Of its beginnings, the shortest first; see `keys_of`.
        load : mapping of str to int
            How many requests each has that can be chosen; not empty.
        """
        chosen = self._best(keys, load)
        self.record(keys, chosen)
        return chosen

    def is_diverted(self, keys: Sequence[Key], load: Mapping[str, int]) -> bool:
        """True if `choose` returns another name than the one that had the longest beginning, for its load."""
        known = self._known(keys, load)
        return known is not None and self._is_busy(known, load)

    def _best(self, keys: Sequence[Key], load: Mapping[str, int]) -> str:
        known = self._known(keys, load)
        if known is None or self._is_busy(known, load):
            return min(load, key=lambda name: (load[name], self._n_new[name], name))
        return known

    def _is_busy(self, name: str, load: Mapping[str, int]) -> bool:
        return load[name] - min(load.values()) > self._max_lead

    def _known(self, keys: Sequence[Key], load: Mapping[str, int]) -> str | None:
        names = (self._last.get(key) for key in reversed(keys))
        return next((name for name in names if name is not None and name in load), None)

    def record(self, keys: Iterable[Key], name: str) -> None:
        """A prompt has gone there."""
        for key in keys:
            self._n_new[name] += key not in self._last
            self._last[key] = name
            self._last.move_to_end(key)
        while len(self._last) > self._n_keys_max:
            self._last.popitem(last=False)

    def forget(self, name: str) -> None:
        """Forget a server and its prompts."""
        self._last = OrderedDict((k, v) for k, v in self._last.items() if v != name)
        del self._n_new[name]


def keys_of(prompt: bytes) -> list[Key]:
    """A key for each beginning of whole blocks, and for all of a prompt that is shorter than one."""
    digest, keys = hashlib.blake2b(digest_size=8), list[Key]()
    for start in range(0, min(len(prompt), BLOCK * N_BLOCKS_MAX), BLOCK):
        block = prompt[start : start + BLOCK]
        if len(block) < BLOCK and keys:
            break
        digest.update(block)
        keys.append(digest.digest())
    return keys


def prompt_bytes(body: Mapping[str, Any]) -> bytes:
    """Return bytes for the prompt of a body of any route: prompts that begin alike have bytes that begin alike."""
    head = [body[name] for name in ("tools", "system", "instructions") if body.get(name)]
    for name in PROMPTS:
        given = body.get(name)
        if isinstance(given, str):
            return _plain(head) + given.encode("utf-8", "replace")
        if given and isinstance(given, list | tuple):
            if all(type(token) is int and 0 <= token < 1 << 31 for token in given):
                return _plain(head) + array("i", given).tobytes()
            return b"\n".join([_plain(head), *map(_plain, given)])
    return _plain(head)


def _plain(value: object) -> bytes:
    return json.dumps(value, default=str).encode("utf-8", "replace") if value else b""


def raw_prompt(body: bytes) -> bytes:
    """Return a JSON body from the start of its prompt, without parsing it; it may be cut off."""
    found = [body.find(f'"{name}"'.encode()) for name in PROMPTS]
    return body[min(i for i in found if i >= 0) :] if max(found) >= 0 else b""
