"""Keys of several clients from a file: names, limits, priorities, and what each has used."""

from __future__ import annotations

import hashlib
import logging
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

from cllm import InvalidArgumentError
from cllm.checks import INT32_MAX, check_float, check_int, check_tenant, closest
from cllm.server.http.problems import too_many
from cllm.server.operation.usage import Access
from cllm.settings import HIDDEN

logger: logging.Logger = logging.getLogger("cllm.server")

CHECK_S = 1.0  # between two looks at the file
MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Limits of one key; None: no limit.

    Attributes
    ----------
    requests_per_minute, tokens_per_minute : int or None
        Averages: a key that was idle for a minute may use all of them at once.  Tokens of prompts and outputs
        count; those of the prefix cache do not.
    max_concurrent : int or None
        Requests that are open at once.
    priority : int
        Requests of the key are not more urgent than this; lower is more urgent.
    weight : float
        Share of the engine among keys with waiting requests; see `EngineConfig.tenant_weights`.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    priority: int = 0
    weight: float = 1.0


class Allowance:
    """Units that a key may use.

    Parameters
    ----------
    n_per_minute : int or None
        Units that are added each minute, and the most that may be left; None: any number.
    clock : callable
        Returns a time in seconds.
    """

    def __init__(self, n_per_minute: int | None, clock: Callable[[], float]) -> None:
        self.n_per_minute = n_per_minute
        self._clock = clock
        self._left = float(n_per_minute or 0)
        self._filled_at = clock()

    def wait_s(self) -> float:
        """Return the seconds until a unit is left; 0 if there is one."""
        if self.n_per_minute is None:
            return 0.0
        now = self._clock()
        rate = self.n_per_minute / MINUTE_S
        self._left = min(self.n_per_minute, self._left + rate * (now - self._filled_at))
        self._filled_at = now
        return max(0.0, (1 - self._left) / rate)

    def use(self, n: int) -> None:
        """Use units, also more than are left: the next ones then wait longer."""
        self._left -= n


class ApiKey:
    """Key of a client, with what was used and what may be used.

    Parameters
    ----------
    name : str
    limits : KeyLimits
    clock : callable
        Returns a time in seconds.

    Attributes
    ----------
    name : str
        Name of the client: its tenant in the queue, and its label in the metrics.
    n_requests, n_prompt, n_cached, n_output : int
        Requests that were admitted, and the tokens of their completions.
    n_refused : int
        Requests that exceeded a limit.
    """

    def __init__(self, name: str, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self.name = name
        self.n_requests = self.n_refused = 0
        self.n_prompt = self.n_cached = self.n_output = 0
        self._n_open = 0
        self._clock = clock
        self.limits: KeyLimits = limits
        self._requests = Allowance(limits.requests_per_minute, clock)
        self._tokens = Allowance(limits.tokens_per_minute, clock)

    def set_limits(self, limits: KeyLimits) -> None:
        """Replace the limits; a changed rate begins with a whole minute's units."""
        before, self.limits = self.limits, limits
        if limits.requests_per_minute != before.requests_per_minute:
            self._requests = Allowance(limits.requests_per_minute, self._clock)
        if limits.tokens_per_minute != before.tokens_per_minute:
            self._tokens = Allowance(limits.tokens_per_minute, self._clock)

    @contextmanager
    def admitted(self, access: Access | None) -> Iterator[None]:
        """Count a request for the time of the block, and its tokens at the end.

        Raises
        ------
        Problem
            429: a limit of the key is reached; names it and says when to try again.
        """
        limits = self.limits
        for name, allowance in (
            ("requests_per_minute", self._requests),
            ("tokens_per_minute", self._tokens),
        ):
            if wait_s := allowance.wait_s():
                self._refuse(f"{name} ({allowance.n_per_minute})", wait_s)
        if limits.max_concurrent is not None and self._n_open >= limits.max_concurrent:
            self._refuse(f"max_concurrent ({limits.max_concurrent})", 1.0)
        self._requests.use(1)
        self.n_requests += 1
        self._n_open += 1
        try:
            yield
        finally:
            self._n_open -= 1
            if access is not None:
                self._tokens.use(access.n_prompt - access.n_cached + access.n_output)
                self.n_prompt += access.n_prompt
                self.n_cached += access.n_cached
                self.n_output += access.n_output

    def _refuse(self, limit: str, wait_s: float) -> None:
        self.n_refused += 1
        text = f"the key {self.name!r} has reached its {limit}"
        raise too_many(text, retry_after_s=wait_s, code="rate_limit_exceeded")


class KeyRing:
    """The keys of a file, which is read again when it changes.  Event loop only.

    A file that cannot be read, or has an error, leaves the present keys in force, and is logged once.

    Parameters
    ----------
    path : str
        TOML: a table for each client, with its `key` and the fields of `KeyLimits`.

    Raises
    ------
    InvalidArgumentError
        The file cannot be used: names the client, the field, the value and the limit.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = Path(path)
        self._clock = clock
        self._by_name: dict[str, ApiKey] = {}
        self._by_hash: dict[bytes, ApiKey] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._stamp = self._stamp_now()
        self._read()
        self._looked_at = clock()

    def find(self, token: bytes) -> ApiKey | None:
        """Return the key of a request; None if there is no such key."""
        if self._clock() - self._looked_at >= CHECK_S:
            self._look()
        # Times of a search among hashes tell nothing about the keys.
        return self._by_hash.get(hashlib.sha256(token).digest())

    def text(self) -> bytes:
        """Return the counts of all keys in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the counters of all keys; called by the registry."""
        keys = list(self._by_name.values())
        for name, field, what in (
            ("requests", "n_requests", "Requests that were admitted"),
            ("refusals", "n_refused", "Requests that exceeded a limit of the key"),
        ):
            family = CounterMetricFamily(f"cllm_key_{name}", what, labels=("key",))
            for key in keys:
                family.add_metric([key.name], getattr(key, field))
            yield family
        tokens = CounterMetricFamily(
            "cllm_key_tokens", "Tokens of prompts, of their cached parts, and of outputs",
            labels=("key", "kind"),
        )  # fmt: skip
        for key in keys:
            for kind in ("prompt", "cached", "output"):
                tokens.add_metric([key.name, kind], getattr(key, f"n_{kind}"))
        yield tokens

    def _look(self) -> None:
        self._looked_at = self._clock()
        if (stamp := self._stamp_now()) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._read()
        except InvalidArgumentError as error:
            logger.error("the present API keys stay in force: %s", error)
        else:
            logger.info("%d API keys read from %s", len(self._by_name), self._path)

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> None:
        by_name: dict[str, ApiKey] = {}
        by_hash: dict[bytes, ApiKey] = {}
        for name, (secret, limits) in read_keys(self._path).items():
            # What a key has used stays known under its name.
            key = self._by_name.get(name) or ApiKey(name, limits, self._clock)
            if key.limits != limits:
                key.set_limits(limits)
            by_name[name] = by_hash[hashlib.sha256(secret.encode()).digest()] = key
        self._by_name, self._by_hash = by_name, by_hash


def read_keys(path: Path) -> dict[str, tuple[str, KeyLimits]]:
    """Return the key and the limits of each client in a file, by name.

    Raises
    ------
    InvalidArgumentError
        See `KeyRing`.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise InvalidArgumentError("api_keys", str(path), f"a file of TOML ({problem})") from None
    if not tables:
        raise InvalidArgumentError("api_keys", str(path), "a file with at least one key")
    found: dict[str, tuple[str, KeyLimits]] = {}
    owners: dict[str, str] = {}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise InvalidArgumentError(f"api_keys: {name}", HIDDEN, "a table with a key")
        secret, limits = _key_of(name, table)
        if (other := owners.setdefault(secret, name)) != name:
            raise InvalidArgumentError(f"{name}.key", HIDDEN, f"another one than that of {other}")
        found[name] = secret, limits
    return found


def _key_of(name: str, table: Mapping[str, Any]) -> tuple[str, KeyLimits]:
    known = ["key", *(field.name for field in fields(KeyLimits))]
    for field in table:
        if field not in known:
            meant = closest(field, known)
            hint = f"called {meant!r}" if meant else f"one of {', '.join(known)}"
            raise InvalidArgumentError(f"{name}.{field}", HIDDEN, hint)
    secret = table.get("key")
    if not isinstance(secret, str) or not secret.strip():
        raise InvalidArgumentError(f"{name}.key", HIDDEN, "text that is not blank")
    check_tenant("api_keys", name)
    values: dict[str, Any] = {field: value for field, value in table.items() if field != "key"}
    for field, value in values.items():
        if field == "weight":
            values[field] = check_float(f"{name}.{field}", value, 0.001, 1000.0)
        else:
            low = -INT32_MAX if field == "priority" else 1
            values[field] = check_int(f"{name}.{field}", value, low, INT32_MAX)
    return secret.strip(), KeyLimits(**values)
