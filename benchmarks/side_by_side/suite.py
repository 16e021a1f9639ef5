"""The measurements a to i, n, r, v and w: which peers take turns at what, and with which sizes."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from benchmarks.side_by_side import (
    bare_loop,
    embedding,
    engine_loop,
    first_chat,
    footprint,
    http_loop,
    joining,
    neighbours,
    overflow,
    real_chats,
    sequential,
    servers,
    shared_head,
    single,
)
from benchmarks.side_by_side.engine_loop import Decoding
from benchmarks.side_by_side.http_load import Outcome
from benchmarks.side_by_side.peers import Peers
from benchmarks.side_by_side.quiet import Quiet
from benchmarks.side_by_side.raw_loop import raw_decode_rate
from benchmarks.side_by_side.records import (
    ALONE,
    BARE_SERVER,
    BATCHED_BENCH,
    CLLM,
    CLLM_EMBEDDED,
    CLLM_PROCESS,
    CLLM_SERVE,
    CLLM_SERVE_THREAD,
    LIMITS,
    LLAMA_CPP_PYTHON,
    LLAMA_SERVER,
    PYTHON_SERVER,
    XLLAMACPP,
    Record,
)
from benchmarks.side_by_side.servers import ServerPeer
from benchmarks.side_by_side.targets import (
    DEFAULT_SWITCH,
    EQUAL_CLIENTS,
    FRESH_PROCESS,
    MODEL,
    QUICK_SWITCH,
    SMALL_MODEL,
    SMALL_WIDTHS,
    WIDTHS,
    sequences,
)
from benchmarks.side_by_side.workload import (
    EMBEDDED_MODEL,
    EMBEDDING_MODEL,
    REAL_MODEL,
    Setup,
    cells_for,
    model_path,
)

N_PROMPT = 64
N_TRIES = 2  # number of tries of a turn, if the machine is disturbed
QUICK_WIDTHS = (1, 8, 32)
SERVERS = (CLLM_SERVE, LLAMA_SERVER, PYTHON_SERVER)

Metrics = Mapping[str, float]
Task = Callable[[], Metrics]


class Sizes(Protocol):
    """Properties of every measurement over HTTP."""

    @property
    def case(self) -> str: ...
    @property
    def n_seq_max(self) -> int: ...
    @property
    def n_ctx(self) -> int: ...


@dataclass(frozen=True)
class Options:
    """Size of the measurements, and the peers that are measured.

    Attributes
    ----------
    n_threads : int
        Compute threads of every peer.
    n_turns : int
    cases : frozenset of str
        Names of the cases to measure; if empty, all are measured.
    tell : callable
        Called with a line about each step.
    where : str
        Date, commit and machine.
    """

    peers: Peers
    n_threads: int
    n_turns: int
    is_quick: bool
    tell: Callable[[str], None]
    cases: frozenset[str] = frozenset()
    quiet: Quiet = field(default_factory=Quiet)
    where: str = ""

    def measures(self, case: str) -> bool:
        """True if this case was requested."""
        return not self.cases or case in self.cases

    def setup(self, model: str, n_ctx: int, n_seq_max: int) -> Setup:
        """Return the settings of one case."""
        embeds = model == EMBEDDING_MODEL
        return Setup(model_path(model), self.n_threads, n_ctx, n_seq_max, embeds=embeds)

    def widths(self, widths: Sequence[int]) -> Sequence[int]:
        """Return `QUICK_WIDTHS` for a quick run, otherwise the given widths."""
        return QUICK_WIDTHS if self.is_quick else widths


def in_turns(
    options: Options, measurement: str, model: str, case: str, tasks: Mapping[str, Task]
) -> Iterator[Record]:
    """Measure every peer once per turn, and yield the records; every other turn has the opposite order.

    A turn in which the machine was disturbed is discarded and measured again.  The last of `N_TRIES` tries
    is kept in any case, with its `busy`.  If a peer fails, the failure is reported, and only this peer has no
    record of the turn.
    """
    for turn in range(options.n_turns if options.measures(case) else 0):
        for left in reversed(range(N_TRIES)):
            records = list(_turn(options, (measurement, model, case), turn, tasks))
            busy = max((r.busy for r in records if r.busy), default=1.0)
            if not (left and options.quiet.is_disturbed(busy)):
                break
            options.tell(
                f"{measurement} {case} turn {turn + 1}: thrown away, a loop took {busy:.2f} times "
                "as long as at its fastest"
            )
        yield from records


def _turn(
    options: Options, place: tuple[str, str, str], turn: int, tasks: Mapping[str, Task]
) -> Iterator[Record]:
    measurement, model, case = place
    before = options.quiet.busy()
    for peer in list(tasks)[:: -1 if turn % 2 else 1]:
        try:
            metrics = tasks[peer]()
        except Exception as error:
            options.tell(f"{measurement} {case}: {peer} failed: {error!r}")
            continue
        after = options.quiet.busy()
        shown = ", ".join(f"{k} {v:.4g}" for k, v in metrics.items())
        options.tell(f"{measurement} {model} {case} turn {turn + 1}: {peer}: {shown}")
        yield Record(*place, peer, turn, metrics, max(before, after), options.where)
        before = after


def available(options: Options, tasks: Mapping[str, Task]) -> dict[str, Task]:
    """Return the tasks without those of missing peers."""
    return {peer: task for peer, task in tasks.items() if not options.peers.missing[peer]}


# --- Decoding: a, g, h -----------------------------------------------------------------------
def _n_output(width: int, *, is_quick: bool) -> int:
    """Return the number of output tokens of each sequence: fewer for more sequences."""
    return max(32, 128 // width) if is_quick else max(48, 192 // width)


def _decode(options: Options, measurement: str, model: str, width: int) -> Iterator[Record]:
    n_output = _n_output(width, is_quick=options.is_quick)
    setup = options.setup(model, cells_for(width, N_PROMPT + n_output), width)
    peers, case = options.peers, sequences(width)

    def ours(*, process: bool) -> Metrics:
        call = Decoding(setup, N_PROMPT, n_output, process=process)
        return dataclasses.asdict(engine_loop.in_a_process(call))

    def raw() -> Metrics:
        assert peers.tools is not None
        return {"tokens_per_s": raw_decode_rate(peers.tools, setup, N_PROMPT, n_output)}

    tasks: dict[str, Task] = {
        CLLM: partial(ours, process=False),
        CLLM_PROCESS: partial(ours, process=True),
        BATCHED_BENCH: raw,
    }
    if width == 1:
        arguments = (peers, setup, N_PROMPT, n_output)
        tasks[LLAMA_CPP_PYTHON] = lambda: {"tokens_per_s": single.llama_cpp_python_rate(*arguments)}
        tasks[XLLAMACPP] = lambda: {"tokens_per_s": single.xllamacpp_rate(*arguments)}
    yield from in_turns(options, measurement, model, case, available(options, tasks))


def measure_a(options: Options) -> Iterator[Record]:
    """Decode throughput through the public API."""
    for width in options.widths(WIDTHS):
        yield from _decode(options, "a", MODEL, width)


def measure_g(options: Options) -> Iterator[Record]:
    """Decode and HTTP throughput with a small model, where the overhead of each token is visible."""
    for width in options.widths(SMALL_WIDTHS):
        yield from _decode(options, "g", SMALL_MODEL, width)
    for width in options.widths(SMALL_WIDTHS):
        sizes = http_loop.LoopSizes(width, max(3, 32 // width))
        peers = (CLLM_SERVE, CLLM_SERVE_THREAD, LLAMA_SERVER, *LIMITS)
        yield from _closed_loop(options, "g", SMALL_MODEL, sizes, peers=peers)


def measure_h(options: Options) -> Iterator[Record]:
    """Throughput beside a half busy event loop; one processor is left to that loop if there are two."""
    n_threads = max(1, min(options.n_threads, (os.cpu_count() or 1) - 1))
    n_output = 32 if options.is_quick else 64
    for case, switch_interval_s in ((DEFAULT_SWITCH, None), (QUICK_SWITCH, 1e-4)):
        setup = dataclasses.replace(
            options.setup(MODEL, cells_for(EQUAL_CLIENTS, N_PROMPT + n_output), EQUAL_CLIENTS),
            n_threads=n_threads,
        )
        idle = Decoding(setup, N_PROMPT, n_output, switch_interval_s=switch_interval_s)
        tasks = {
            peer: partial(_kept, dataclasses.replace(idle, process=process))
            for peer, process in ((CLLM, False), (CLLM_PROCESS, True))
        }
        yield from in_turns(options, "h", MODEL, case, tasks)


def _kept(idle: Decoding) -> Metrics:
    """Return the share of the engine's tokens/s that is left beside a busy event loop."""
    alone = engine_loop.in_a_process(idle)
    beside = engine_loop.in_a_process(dataclasses.replace(idle, is_busy=True))
    return {
        "kept": beside.tokens_per_s / alone.tokens_per_s,
        "handovers_per_tick": beside.handovers_per_tick,
    }


# --- Over HTTP: b, c, d, e, f ----------------------------------------------------------------
def _over_http(
    options: Options,
    measurement: str,
    model: str,
    sizes: Sizes,
    measure: Callable[..., Coroutine[Any, Any, Outcome]],
    peers: Sequence[str] = SERVERS,
    others: Mapping[str, Task] = MappingProxyType({}),
    *,
    keeps_servers: bool = False,
) -> Iterator[Record]:
    """Measure servers in turns.

    Parameters
    ----------
    others : mapping
        Tasks without a server.
    keeps_servers : bool
        False: each turn starts new servers.  True: they run for all turns, which take seconds, so that a machine
        that gets slower or faster does so for all peers of a turn.  `measure` must take a seed.
    """
    setup = options.setup(model, sizes.n_ctx, sizes.n_seq_max)
    # Of each peer: the same requests in the same turn.
    ports, seeds = dict[str, int](), defaultdict[str, Iterator[int]](itertools.count)

    def start(peer: str, owner: ExitStack) -> int:
        port = servers.free_port()
        owner.enter_context(servers.running(_server(peer, setup, port, options.peers), port))
        return port

    def measured(peer: str, port: int, *seed: str) -> Metrics:
        outcome = asyncio.run(measure(port, peer, sizes, *seed))
        for failure in outcome.failures:
            options.tell(f"{measurement} {sizes.case}: {peer}: {failure}")
        return outcome.metrics

    def in_new_server(peer: str) -> Metrics:
        with ExitStack() as owner:
            return measured(peer, start(peer, owner))

    def in_kept_server(peer: str, owner: ExitStack) -> Metrics:
        seed = f"{next(seeds[peer])}"
        if peer not in ports:
            ports[peer] = start(peer, owner)
        try:
            return measured(peer, ports[peer], seed)
        except Exception:
            del ports[peer]  # it may have died: the next turn starts another
            raise

    def alone() -> Metrics:
        assert isinstance(sizes, bare_loop.Sizes)
        return bare_loop.in_a_process(setup, sizes)

    with ExitStack() as owner:
        kept = partial(in_kept_server, owner=owner)
        task = kept if keeps_servers else in_new_server
        tasks = {peer: alone if peer == ALONE else partial(task, peer) for peer in peers}
        tasks = {**available(options, tasks), **others}
        yield from in_turns(options, measurement, model, sizes.case, tasks)


_closed_loop = partial(_over_http, measure=http_loop.measure, keeps_servers=True)


def _server(peer: str, setup: Setup, port: int, peers: Peers) -> ServerPeer:
    if peer in (CLLM_SERVE, CLLM_SERVE_THREAD):
        return servers.cllm_serve(setup, port, process=peer == CLLM_SERVE)
    if peer == BARE_SERVER:
        return servers.bare_server(setup, port)
    make = servers.llama_server if peer == LLAMA_SERVER else servers.python_server
    return make(setup, port, peers)


def measure_b(options: Options) -> Iterator[Record]:
    """Clients in a closed loop; up to `EQUAL_CLIENTS` of them also with the engine in a thread."""
    for sizes in http_loop.QUICK if options.is_quick else http_loop.FULL:
        is_short = sizes.n_clients <= EQUAL_CLIENTS
        ours = (CLLM_SERVE, CLLM_SERVE_THREAD) if is_short else (CLLM_SERVE,)
        peers = (*ours, LLAMA_SERVER, PYTHON_SERVER, *LIMITS)
        yield from _closed_loop(options, "b", MODEL, sizes, peers=peers)


def _http_part(
    letter: str,
    module: Any,
    model: str = MODEL,
    limits: Sequence[str] = (),
    *,
    keeps_servers: bool = False,
) -> Callable[[Options], Iterator[Record]]:
    """Return the measurement of a module that has `FULL`, `QUICK` and `measure`.

    Parameters
    ----------
    limits : sequence of str
        Those of `LIMITS` that are measured in each turn, too.
    keeps_servers : bool
        See `_over_http`.
    """

    def measure(options: Options) -> Iterator[Record]:
        for sizes in module.QUICK if options.is_quick else module.FULL:
            yield from _over_http(
                options,
                letter,
                model,
                sizes,
                module.measure,
                (*SERVERS, *limits),
                keeps_servers=keeps_servers,
            )

    return measure


# --- Next to other programs: n ---------------------------------------------------------------
def measure_n(options: Options) -> Iterator[Record]:
    """Clients in a closed loop while other processes compute."""
    peers = (CLLM_SERVE, CLLM_SERVE_THREAD, LLAMA_SERVER)
    for model in (REAL_MODEL, EMBEDDED_MODEL):
        for sizes in neighbours.QUICK if options.is_quick else neighbours.FULL:
            setup = options.setup(model, sizes.n_ctx, sizes.n_seq_max)
            ours = {CLLM_EMBEDDED: partial(neighbours.embedded, setup, sizes)}
            yield from _over_http(options, "n", model, sizes, neighbours.measure, peers, ours)


# --- The process: i --------------------------------------------------------------------------
def measure_i(options: Options) -> Iterator[Record]:
    """Memory, import, cold start."""
    setup = options.setup(MODEL, 1024, 4)
    task = {CLLM: lambda: footprint.measure(options.peers, setup)}
    yield from in_turns(options, "i", MODEL, FRESH_PROCESS, task)


MEASUREMENTS: Mapping[str, Callable[[Options], Iterator[Record]]] = {
    "a": measure_a,
    "b": measure_b,
    "c": _http_part("c", shared_head),
    "d": _http_part("d", joining),
    "e": _http_part("e", overflow),
    # The small model has short steps, so that a growth with the number of requests is visible.
    "f": _http_part("f", sequential, SMALL_MODEL, LIMITS),
    "g": measure_g,
    "h": measure_h,
    "i": measure_i,
    "n": measure_n,
    "r": _http_part("r", real_chats, REAL_MODEL),
    "v": _http_part("v", embedding, EMBEDDING_MODEL, (ALONE,), keeps_servers=True),
    "w": _http_part("w", first_chat, REAL_MODEL),
}
