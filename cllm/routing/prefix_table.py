"""PrefixTable: the server that last got the longest known prefix of a prompt.  Pure; one thread.

A server answers faster if it has computed a prefix of the prompt before.  The table records where
prompts were sent; servers are not queried.  Load comes first: a server with far more requests than
another gets no more of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cllm.checks import check_int
from cllm.errors import InvalidArgumentError

BLOCK = 256  # bytes of a prompt for each key, about 64 tokens
N_BLOCKS_MAX = 512  # blocks of a prompt that have keys; the rest of the prompt is ignored
PROMPTS = ("messages", "prompt", "input")  # fields of a request body that can have the prompt

FILE = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
MAX_HEAD = 256  # characters before the comma of a data: URL

Key = bytes


class PrefixTable:
    """Table from prefixes of prompts to the servers that had them last.

    Parameters
    ----------
    n_keys_max : int
        Number of prefixes to keep; the least recently used ones are dropped first.
    max_lead : int
        Prefixes are ignored for a server with more than so many requests above the least busy one.

    Raises
    ------
    InvalidArgumentError
        Names the field.
    """

    def __init__(self, *, n_keys_max: int = 100_000, max_lead: int = 8) -> None:
        n_keys_max = check_int("n_keys_max", n_keys_max, 1, 1 << 30, InvalidArgumentError)
        max_lead = check_int("max_lead", max_lead, 0, 1 << 30, InvalidArgumentError)
        self._n_keys_max = n_keys_max
        self._max_lead = max_lead
        self._last: OrderedDict[Key, str] = OrderedDict()
        self._n_new: Counter[str] = (
            Counter()
        )  # new blocks sent to each server: decides between servers with equal load

    def __len__(self) -> int:
        """Number of known prefixes."""
        return len(self._last)

    def choose(self, keys: Sequence[Key], load: Mapping[str, int]) -> str:
        """Return the server for a prompt, and record the choice.

        Parameters
        ----------
        keys : sequence of bytes
            Keys of the prefixes of the prompt, the shortest first; see `keys_of`.
        load : mapping of str to int
            Number of requests of each server that can be chosen; not empty.
        """
        chosen = self._best(keys, load)
        self.record(keys, chosen)
        return chosen

    def is_diverted(self, keys: Sequence[Key], load: Mapping[str, int]) -> bool:
        """True if the load of the server with the longest prefix makes `choose` return another server."""
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
        """Record that the prompt with these keys was sent to a server."""
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
    """Return a key for each prefix of whole blocks, at most 512; a prompt shorter than a block has one key."""
    digest, keys = hashlib.blake2b(digest_size=8), list[Key]()
    for start in range(0, min(len(prompt), BLOCK * N_BLOCKS_MAX), BLOCK):
        block = prompt[start : start + BLOCK]
        if len(block) < BLOCK and keys:
            break
        digest.update(block)
        keys.append(digest.digest())
    return keys


def prompt_bytes(body: Mapping[str, Any]) -> bytes:
    """Return the prompt of a request body as bytes; prompts with equal beginnings have equal first bytes."""
    head = [body[name] for name in ("tools", "system", "instructions") if body.get(name)]
    for name in PROMPTS:
        given = body.get(name)
        if isinstance(given, str):
            return _plain(head) + given.encode("utf-8", "replace")
        if given and isinstance(given, Mapping):  # a prompt of llama-server with images
            return _plain(head) + _plain(given)
        if given and isinstance(given, list | tuple):
            if all(type(token) is int and 0 <= token < 1 << 31 for token in given):
                return _plain(head) + array("i", given).tobytes()
            return b"\n".join([_plain(head), *map(_plain, given)])
    return _plain(head)


def _plain(value: object) -> bytes:
    return json.dumps(_keyed(value), default=str).encode("utf-8", "replace") if value else b""


def _keyed(value: object) -> object:
    """Return a value with a digest in place of the file of each image, which may have megabytes."""
    if isinstance(value, list | tuple):
        return [_keyed(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {name: _file_key(name, item) or _keyed(item) for name, item in value.items()}


def _file_key(name: object, value: object) -> str | None:
    """Return a digest of a field `data` and of a data: URL with base64; None for another field."""
    if not isinstance(value, str) or not (name == "data" or FILE.match(value, 0, MAX_HEAD)):
        return None
    return hashlib.blake2b(value.encode("utf-8", "replace"), digest_size=16).hexdigest()


def raw_prompt(body: bytes) -> bytes:
    """Return the rest of a JSON body, complete or cut off, from its prompt on, unparsed; empty without one."""
    found = [body.find(f'"{name}"'.encode()) for name in PROMPTS]
    return body[min(i for i in found if i >= 0) :] if max(found) >= 0 else b""
