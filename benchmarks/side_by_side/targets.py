"""Targets of speed: bounds on the records, and the check whether the records keep to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from benchmarks.side_by_side import (
    embedding,
    first_chat,
    http_loop,
    joining,
    neighbours,
    overflow,
    real_chats,
    sequential,
    shared_head,
)
from benchmarks.side_by_side.records import (
    BATCHED_BENCH,
    CLLM,
    CLLM_EMBEDDED,
    CLLM_SERVE,
    CLLM_SERVE_THREAD,
    LIMITS,
    LLAMA_SERVER,
    PYTHON_SERVER,
    Record,
    Spread,
    ratios,
    spread,
    values_of,
)
from benchmarks.side_by_side.workload import EMBEDDED_MODEL, EMBEDDING_MODEL, REAL_MODEL, clients

MODEL = "qwen3-0.6b/Q4_K_M"
SMALL_MODEL = "two-layer/F16"
WIDTHS = (1, 4, 8, 16, 32)
SMALL_WIDTHS = (1, 4, 8, 16, 32, 64)
EQUAL_CLIENTS, MANY_CLIENTS = 8, 32
DEFAULT_SWITCH, QUICK_SWITCH = "default switch interval", "0.1 ms switch interval"
FRESH_PROCESS = "a fresh process"


@dataclass(frozen=True)
class Target:
    """One line of the page.

    Attributes
    ----------
    key : str
        Name of the target in the notes, such as "a16".
    text : str
        What is measured.
    against : str or None
        The bound is for the ratio to this peer in the same turn; None: for the metric itself.
    """

    key: str
    text: str
    measurement: str
    model: str
    case: str
    metric: str
    peer: str
    against: str | None
    relation: Literal[">=", "<="]
    bound: float

    def holds(self, value: float) -> bool:
        """True if a value keeps to the bound."""
        return value >= self.bound if self.relation == ">=" else value <= self.bound


@dataclass(frozen=True)
class Verdict:
    """Result for a target.

    Attributes
    ----------
    measured : Spread or None
        None if there are no records.
    is_reached : bool or None
        None if there are no records.
    limits : mapping
        `measured` of each of `LIMITS` that has records.
    """

    target: Target
    measured: Spread | None
    is_reached: bool | None
    limits: Mapping[str, Spread] = field(default_factory=dict)


def judge(target: Target, records: Sequence[Record]) -> Verdict:
    """Judge if the median of the turns keeps to the bound."""
    t = target

    def of(peer: str) -> dict[int, float]:
        return values_of(records, t.measurement, t.model, t.case, peer, t.metric)

    def found(peer: str) -> Spread | None:
        own = of(peer)
        return spread(own.values() if t.against is None else ratios(own, of(t.against)))

    measured = found(t.peer)
    if measured is None:
        return Verdict(t, None, None)
    limits = {peer: limit for peer in LIMITS if (limit := found(peer)) is not None}
    return Verdict(t, measured, t.holds(measured.median), limits)


def sequences(n: int) -> str:
    """Return the case name of `n` sequences at once."""
    return f"{n} sequence{'s' * (n > 1)}"


def _decode() -> Iterator[Target]:
    rate = partial(Target, metric="tokens_per_s", peer=CLLM, against=BATCHED_BENCH, relation=">=")
    for n in WIDTHS:
        yield rate(
            key=f"a{n}",
            text=f"decode, {sequences(n)}",
            measurement="a",
            model=MODEL,
            case=sequences(n),
            bound={1: 0.99, 4: 0.98, 8: 0.98}.get(n, 1.0),
        )
    yield rate(
        key="g32",
        text=f"two layers: decode, {sequences(32)}",
        measurement="g",
        model=SMALL_MODEL,
        case=sequences(32),
        bound=0.75,
    )


def _http() -> Iterator[Target]:
    served = partial(Target, measurement="b", model=MODEL, peer=CLLM_SERVE)
    for sizes in http_loop.FULL:
        # Settings of `cllm tune` may gain more than a server of Python costs.
        tuned = {EQUAL_CLIENTS: 1.08, MANY_CLIENTS: 1.05}.get(sizes.n_clients, 1.0)
        # The example server batches with the same kernels: the target is only to be no slower.
        for mark, rival, bound in (("", LLAMA_SERVER, tuned), ("p", PYTHON_SERVER, 1.0)):
            yield served(
                key=f"b{sizes.n_clients}{mark}",
                text=f"throughput over HTTP, {sizes.case}",
                case=sizes.case,
                metric="tokens_per_s",
                against=rival,
                relation=">=",
                bound=bound,
            )
    for key, percent, n, bound in (
        (f"b{EQUAL_CLIENTS}t", 50, EQUAL_CLIENTS, 0.55),
        (f"b{MANY_CLIENTS}t", 50, MANY_CLIENTS, 0.6),
        (f"b{MANY_CLIENTS}t99", 99, MANY_CLIENTS, 1.1),
    ):
        yield served(
            key=key,
            text=f"TTFT p{percent} over HTTP, {clients(n)}",
            case=clients(n),
            metric=f"ttft_p{percent}_ms",
            against=LLAMA_SERVER,
            relation="<=",
            bound=bound,
        )
    small = partial(
        Target, measurement="g", model=SMALL_MODEL, peer=CLLM_SERVE, against=LLAMA_SERVER
    )
    for n in SMALL_WIDTHS:
        yield small(
            key=f"g{n}h",
            text=f"two layers: throughput over HTTP, {clients(n)}",
            case=clients(n),
            metric="tokens_per_s",
            relation=">=",
            bound=2.5 if n == MANY_CLIENTS else 1.0,
        )
    for key, what, metric, bound in (
        ("g1t", "TTFT p50", "ttft_p50_ms", 1.25),
        ("g1i", "ITL p99", "itl_p99_ms", 1.3),
    ):
        yield small(
            key=key,
            text=f"two layers: {what}, {clients(1)}",
            case=clients(1),
            metric=metric,
            relation="<=",
            bound=bound,
        )


def _load() -> Iterator[Target]:
    served = partial(Target, model=MODEL, peer=CLLM_SERVE)
    for head in shared_head.FULL:
        yield served(
            key=f"c{head.n_requests}",
            text=f"total time, {head.case}",
            measurement="c",
            case=head.case,
            metric="total_s",
            against=LLAMA_SERVER,
            relation="<=",
            bound=0.25,
        )
    for joined in joining.FULL:
        yield served(
            key="d",
            text=f"ITL p99, {joined.case}",
            measurement="d",
            case=joined.case,
            metric="itl_p99_ms",
            against=LLAMA_SERVER,
            relation="<=",
            bound=0.35,
        )
    for flood in overflow.FULL:
        yield served(
            key="e",
            text=f"share finished, {flood.case}",
            measurement="e",
            case=flood.case,
            metric="finished_share",
            against=None,
            relation=">=",
            bound=1.0,
        )
    # The small model has short steps, so that a growth with the number of requests is visible.
    for row in sequential.FULL:
        yield served(
            model=SMALL_MODEL,
            key=f"f{row.n_output}",
            text=f"two layers: last tenth ÷ first, {row.case}",
            measurement="f",
            case=row.case,
            metric="last_over_first",
            against=None,
            relation="<=",
            bound=1.01,
        )
        if row.n_output == 1:
            yield served(
                model=SMALL_MODEL,
                key="f1s",
                text=f"two layers: total time, {row.case}",
                measurement="f",
                case=row.case,
                metric="total_s",
                against=LLAMA_SERVER,
                relation="<=",
                bound=0.95,
            )


def _texts() -> Iterator[Target]:
    served = partial(Target, measurement="v", model=EMBEDDING_MODEL, peer=CLLM_SERVE)
    for sizes in embedding.FULL:
        # Batches of 256 tokens take less time than those of 512, which llama-server fills.
        batched = 1.05 if sizes.n_clients > 1 else 1.0
        for mark, rival, bound in (("", LLAMA_SERVER, batched), ("p", PYTHON_SERVER, 1.0)):
            yield served(
                key=f"v{sizes.n_clients}{mark}",
                text=f"vectors: throughput, {sizes.case}",
                case=sizes.case,
                metric="tokens_per_s",
                against=rival,
                relation=">=",
                bound=bound,
            )


def _chats() -> Iterator[Target]:
    served = partial(
        Target, measurement="r", model=REAL_MODEL, peer=CLLM_SERVE, against=LLAMA_SERVER
    )
    for sizes in real_chats.FULL:
        if sizes.think_s:  # the pauses of the clients limit the throughput
            continue
        yield served(
            key=f"r{sizes.n_clients}",
            text=f"real chats: throughput, {sizes.case}",
            case=sizes.case,
            metric="tokens_per_s",
            relation=">=",
            # Without computing any prompt, 8 clients would have 1.34.
            bound=1.0 if sizes.n_clients == 1 else 1.3,
        )
        if sizes.n_clients == EQUAL_CLIENTS:
            yield served(
                key=f"r{sizes.n_clients}t",
                text=f"real chats: TTFT p50 of turns 2 to 4, {sizes.case}",
                case=sizes.case,
                metric="later_turns_ttft_p50_ms",
                relation="<=",
                bound=0.8,
            )
    for first in first_chat.FULL:
        yield served(
            key="w",
            text=f"real chats: TTFT ÷ the others', {first.case}",
            measurement="w",
            case=first.case,
            metric="first_over_later",
            against=None,
            relation="<=",
            bound=1.1,
        )


def _neighbours() -> Iterator[Target]:
    """Require cllm's peers to match llama-server beside one or two busy programs."""
    beside = partial(Target, measurement="n", against=LLAMA_SERVER, bound=1.0)
    for model, letter in ((REAL_MODEL, "r"), (EMBEDDED_MODEL, "e")):
        for sizes in (s for s in neighbours.FULL if s.n_neighbours):
            for peer, mark in ((CLLM_SERVE, ""), (CLLM_SERVE_THREAD, "t"), (CLLM_EMBEDDED, "e")):
                same = partial(beside, model=model, case=sizes.case, peer=peer)
                key = f"n{letter}{sizes.n_clients}-{sizes.n_neighbours}{mark}"
                what = f"{model.partition('/')[0]}, {peer}: {{}}, {sizes.case}".format
                yield same(key=key, text=what("throughput"), metric="tokens_per_s", relation=">=")
                yield same(
                    key=f"{key}g", text=what("longest gap"), metric="itl_max_ms", relation="<="
                )


def _process() -> Iterator[Target]:
    own = partial(Target, model=MODEL, peer=CLLM, against=None)
    for key, case in (("h", DEFAULT_SWITCH), ("hq", QUICK_SWITCH)):
        yield own(
            key=key,
            text=f"tokens/s kept, {case}",
            measurement="h",
            case=case,
            metric="kept",
            relation=">=",
            bound=0.9,
        )
    fresh = partial(own, measurement="i", case=FRESH_PROCESS, relation="<=")
    yield fresh(
        key="im",
        text="memory above the model and the cache",
        metric="rss_above_mib",
        bound=60e6 / 2**20,
    )
    yield fresh(key="ii", text="import of cllm", metric="import_s", bound=0.25)


TARGETS = tuple(
    sorted(
        [*_decode(), *_http(), *_load(), *_chats(), *_texts(), *_neighbours(), *_process()],
        key=lambda target: target.measurement,
    )
)
