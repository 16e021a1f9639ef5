"""Fair queuing: tenants share rows and seq_ids by their weights, within a level of priority."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.core import scheduler
from cllm.engine.core.sequence import AGEING_S
from cllm.engine.core.sequence import Sequence as RunningSequence
from cllm.engine.core.tenants import N_REMEMBERED, Tenants, by_turn, may_yield, yielding
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling_params import SamplingParams
from cllm.testing.fake_decoder import FakeRun, Latency
from tests.conftest import some_in_fast
from tests.simulation.reference import endless
from tests.simulation.simulator import Simulator


def sequence_of(n_tokens: int, *, tenant: str, priority: int = 0) -> RunningSequence:
    request = GenerationRequest(
        f"{tenant}{n_tokens}", n_tokens, (1,) * n_tokens, SamplingParams(), priority, 0.0, None,
        tenant=tenant,
    )  # fmt: skip
    return RunningSequence(request)


SOME = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-1, 1)), max_size=8)


@given(
    SOME,
    SOME,
    st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0, 3.0]) for name in "abcd"}),
)
def test_a_queue_is_looked_through_if_a_sequence_may_yield_to_one_in_it(
    waiting: list[tuple[str, int]], running: list[tuple[str, int]], weights: dict[str, float]
) -> None:
    known = Tenants(weights)

    def sequences(some: list[tuple[str, int]]) -> list[RunningSequence]:
        made = []
        for n, (tenant, priority) in enumerate(some, 1):
            request = sequence_of(n, tenant=tenant, priority=priority).request
            made.append(RunningSequence(request, known.enter(tenant)))
        return made

    queue, there = sequences(waiting), sequences(running)
    assert may_yield(queue, there) == any(list(yielding(one, there)) for one in queue)


def test_a_queue_is_not_sorted_in_each_tick_where_no_sequence_yields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = Simulator(n_ctx=512, n_seq_max=4, n_batch=64, answer=endless)
    for n in range(100):
        sim.submit(b"request %d" % n, max_tokens=50, tenant="ab"[n % 2])
    sim.tick(4)
    n_sorted, next_admitted = 0, scheduler.next_admitted

    def counted(*arguments: Any) -> Any:
        nonlocal n_sorted
        n_sorted += 1
        return next_admitted(*arguments)

    monkeypatch.setattr(scheduler, "next_admitted", counted)
    sim.tick(20)
    assert len(sim.core.queue.running) == 4
    assert n_sorted == 0


LAYOUTS = pytest.mark.parametrize(
    "options",
    some_in_fast([
        {}, {"n_ctx": 160}, {"kv_unified": False, "n_ctx": 1024}, {"separates_prompts": True},
        {"prefix_cache": False}, {"prefix_cache_bytes": 0, "n_ctx": 160}, {"has_pos_min": False},
    ]),
    ids=str,
)  # fmt: skip


def flooded(
    n_requests: int = 200,
    *,
    latency_s: Latency = 0.01,
    max_tokens: int = 20,
    prompt: str = "request {} of a",
    **options: Any,
) -> Simulator:
    """An engine that computes what one tenant has sent at once."""
    sim = Simulator(
        **{"n_ctx": 512, "n_seq_max": 4, "n_batch": 64, "answer": endless, **options},
        latency_s=latency_s,
    )
    for n in range(n_requests):
        sim.submit(prompt.format(n).encode(), max_tokens=max_tokens, tenant="a")
    sim.tick(6)
    return sim


def n_ticks_to_first_token(sim: Simulator, **options: Any) -> int:
    request_id = sim.submit(b"the only one of b", max_tokens=3, **options)
    for n in range(1, 400):
        sim.tick()
        if sim.tokens[request_id]:
            return n
    raise AssertionError("no token in 400 ticks")


@LAYOUTS
def test_a_flood_of_one_tenant_delays_a_request_of_another_by_a_turn_at_most(
    options: dict[str, Any],
) -> None:
    alone = n_ticks_to_first_token(flooded(0, **options), tenant="b")
    sim = flooded(200, **options)
    assert n_ticks_to_first_token(sim, tenant="b") <= alone + 1 + bool(
        options.get("separates_prompts")
    )
    sim.run(at_most=5000)
    sim.check_outcomes()
    sim.check_idle()


def ticks_to_first_tokens(sim: Simulator, n_clients: int = 4, n_requests: int = 48) -> list[int]:
    """Ticks to each first token of clients of b that ask again as soon as they are answered; sorted."""
    n_ticks: list[int] = []
    since: dict[str, int] = {}
    for now in range(4000):
        ended = [request_id for request_id in since if request_id in sim.finished]
        for request_id in ended:
            del since[request_id]
        while len(since) < n_clients and len(n_ticks) + len(since) < n_requests:
            since[sim.submit(f"{now}, {len(since)} of b".encode(), max_tokens=32, tenant="b")] = now
        if not since:
            return sorted(n_ticks)
        silent = [request_id for request_id in since if not sim.tokens[request_id]]
        sim.tick()
        n_ticks += [now + 1 - since[request_id] for request_id in silent if sim.tokens[request_id]]
    raise AssertionError("the clients are not answered")


@pytest.mark.parametrize("separates_prompts", [False, True])
def test_clients_that_ask_again_and_again_hardly_wait_longer_beside_a_flood(
    separates_prompts: bool,
) -> None:
    options: dict[str, Any] = {"n_seq_max": 8, "n_ctx": 4096, "max_tokens": 32}
    options["separates_prompts"] = separates_prompts
    alone, beside = (ticks_to_first_tokens(flooded(n, **options)) for n in (0, 200))
    assert sum(beside) <= 1.15 * sum(alone)
    p95 = int(0.95 * (len(alone) - 1))
    assert beside[p95] <= 1.5 * alone[p95]


def cost_of(runs: Sequence[FakeRun]) -> float:
    """Seconds of a decode of SmolLM2-135M on two cores without AVX-512."""
    rows = (len(run.tokens) for run in runs)
    return 0.006 + sum(0.009 if n == 1 else 0.006 * n for n in rows)


def seconds_to_first_tokens(sim: Simulator, n_clients: int, n_requests: int) -> list[float]:
    """Return the seconds to each first token of clients of b, sorted; each request comes as a tick begins."""
    seconds: list[float] = []
    since: dict[str, float] = {}
    n_sent, n_idle = 0, n_clients
    while len(seconds) < n_requests:
        began = sim.now
        if sim.core.has_work:
            sim.tick()
        answered = [request_id for request_id in since if sim.tokens[request_id]]
        seconds += [sim.now - since.pop(request_id) for request_id in answered]
        for _ in range(n_idle):
            n_sent += 1
            request_id = sim.submit(f"{n_sent:b<40}".encode(), max_tokens=32, tenant="b")
            since[request_id] = began
        open_of_b = [
            r for r in sim.requests.values() if r.tenant == "b" and r.request_id not in sim.finished
        ]
        n_idle = n_clients - len(open_of_b)
    return sorted(seconds)


@pytest.mark.parametrize("n_clients", [1, 2, 3])
def test_beside_a_flood_the_first_tokens_come_after_half_as_long_again_at_most(
    n_clients: int,
) -> None:
    options: dict[str, Any] = {"n_seq_max": 8, "n_ctx": 4096, "n_batch": 512, "max_tokens": 32}
    options |= {"separates_prompts": True, "latency_s": cost_of, "prompt": "{:a<40}"}
    alone, beside = (
        seconds_to_first_tokens(flooded(n, **options), n_clients, 24) for n in (0, 400)
    )
    p95 = int(0.95 * 23)
    assert beside[p95] <= 1.5 * alone[p95]


def test_where_a_decode_costs_more_than_its_rows_prompts_are_not_cut_for_another_tenant() -> None:
    def fixed_cost(runs: Sequence[FakeRun]) -> float:
        return 0.08 + 0.004 * sum(len(run.tokens) for run in runs)

    def seconds(n_of_b: int) -> float:
        sim = Simulator(
            n_ctx=8192, n_seq_max=8, n_batch=512, n_prefill_chunk=128, separates_prompts=True,
            latency_s=fixed_cost, answer=endless, is_checked=False,
        )  # fmt: skip
        sim.submit(b"of c", max_tokens=400, tenant="c")
        ids = [sim.submit(f"{n:a<600}".encode(), max_tokens=4, tenant="a") for n in range(8)]
        began, n_sent = sim.now, 0
        while not all(request_id in sim.finished for request_id in ids):
            sim.tick()
            if n_of_b and sim.now - began > 4 * n_sent:
                n_sent += 1
                sim.submit(f"{n_sent:b<9}".encode(), max_tokens=2, tenant="b")
        return sim.now - began

    assert seconds(1) < 1.3 * seconds(0)


def test_short_prompts_of_many_tenants_are_computed_together() -> None:
    def seconds(*, are_tenants: bool) -> list[float]:
        sim = Simulator(
            n_ctx=8192, n_seq_max=24, n_batch=512, separates_prompts=True, latency_s=cost_of,
            answer=endless, is_checked=False,
        )  # fmt: skip
        sim.submit(b"of c", max_tokens=400, tenant="c")
        sim.tick(9)
        for n in range(16):
            tenant = f"t{n}" if are_tenants else "t"
            sim.submit(f"{n:a<20}".encode(), max_tokens=4, tenant=tenant)
        began, first = sim.now, dict[str, float]()
        while len(first) < 16:
            for request_id in sim.tick():
                if request_id != "r0":
                    first.setdefault(request_id, sim.now - began)
        return sorted(first.values())

    assert seconds(are_tenants=True)[-1] <= 1.1 * seconds(are_tenants=False)[-1]


def test_a_tenant_with_two_requests_has_a_turn_while_new_tenants_come_without_end() -> None:
    sim = Simulator(n_ctx=512, n_seq_max=4, n_batch=64, answer=endless, latency_s=0.01)
    for n in range(8):
        sim.submit(f"{n} of one".encode(), max_tokens=5, tenant=f"new{n}")
    sim.tick(3)
    ids = [sim.submit(b"of a", max_tokens=5, tenant="A") for _ in range(2)]
    for n in range(8, 400):
        sim.tick()
        if n_open_of(sim) < 8:
            sim.submit(f"{n} of one".encode(), max_tokens=5, tenant=f"new{n}")
        if any(request_id in sim.finished for request_id in ids):
            return
    raise AssertionError("tenant A starves")


def n_open_of(sim: Simulator) -> int:
    """Return the number of requests that have not ended."""
    return len(sim.requests) - len(sim.finished)


def test_a_prompt_in_the_cache_does_not_wait_for_the_parts_of_another_tenants() -> None:
    sim = flooded(
        60, n_ctx=8192, n_seq_max=8, n_batch=512, max_tokens=4, n_prefill_chunk=128,
        separates_prompts=True, latency_s=cost_of, prompt="{:a<300}", is_checked=False,
    )  # fmt: skip
    for _ in range(6):
        began, request_id = sim.now, sim.submit(b"the same prompt of b", max_tokens=3, tenant="b")
        while not sim.tokens[request_id]:
            sim.tick()
        waited_s = sim.now - began
        sim.tick(30)
    assert waited_s < 0.3  # a tick that decodes, after at most one of prompts


def test_streams_decode_in_time_beside_the_prompts_of_three_tenants() -> None:
    """Each tick of prompts is short, because the tenant of the stream may send a request."""
    sim = flooded(
        60, n_ctx=4096, n_seq_max=8, n_batch=512, max_tokens=4, n_prefill_chunk=64,
        separates_prompts=True, latency_s=cost_of, prompt="{:a<200}",
    )  # fmt: skip
    sim.submit(b"of c", max_tokens=60, tenant="c")
    for n in range(60):
        sim.submit(f"{n:b<200}".encode(), max_tokens=4, tenant="b")
    sim.tick(20)
    batches = sim.decoder.batches = []
    sim.tick(200)
    n_between, sums = 0, []
    for runs in batches:
        if any(n_tokens == 1 for _, n_tokens, _ in runs):
            sums.append(n_between)
            n_between = 0
        else:
            n_between += sum(n_tokens for _, n_tokens, _ in runs)
    # Parts of one tenant's prompt up to a chunk, the last of at most 8 rows, and then two chunks of another's.
    assert max(sums) < 64 + 8 + 2 * 64
    assert len(sums) > 20


def test_a_flood_that_has_waited_for_long_is_no_more_urgent_than_a_new_tenant() -> None:
    sim = flooded(200, latency_s=AGEING_S)
    assert n_ticks_to_first_token(sim, tenant="b") <= 2


def test_in_one_tenant_the_same_request_waits_for_its_turn_in_the_queue() -> None:
    assert n_ticks_to_first_token(flooded(40), tenant="a") > 50


@pytest.mark.parametrize("tenant", ["", "a", "b"])
def test_one_tenant_is_served_like_none(tenant: str) -> None:
    plain, named = (Simulator(n_ctx=64, n_seq_max=3, n_batch=8, answer=endless) for _ in range(2))
    for sim, name in ((plain, ""), (named, tenant)):
        for n in range(12):
            sim.submit(bytes([65 + n]) * (3 + n), max_tokens=9, priority=n % 3, tenant=name)
    while plain.core.has_work:
        assert plain.tick() == named.tick()
    assert plain.tokens == named.tokens


@pytest.mark.parametrize(
    ("n_seq_max", "weights"),
    [
        (2, {"a": 1.0, "b": 1.0}), (2, {"a": 3.0, "b": 1.0}), (5, {"a": 1.0, "b": 2.0}),
        (12, {"a": 3.0, "b": 1.0}), (12, dict.fromkeys("bcdefgh", 1.0) | {"a": 10.0}),
    ],
    ids=str,
)  # fmt: skip
def test_floods_have_rows_by_their_weights(
    weights: dict[str, float], n_seq_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = Simulator(
        n_ctx=4096, n_seq_max=n_seq_max, n_batch=64, answer=endless, tenant_weights=weights,
        latency_s=0.01,
    )  # fmt: skip
    for n in range(400):
        for tenant in weights:
            prompt = f"{tenant}, {n} of a request".encode() * 3
            sim.submit(prompt, max_tokens=20, tenant=tenant)
    rows: Counter[str] = Counter()
    charge = sim.core.turns.tenants.charge

    def count(charged: Iterable[tuple[RunningSequence, int]]) -> None:
        several = list(charged)
        for sequence, n_rows in several:
            rows[sequence.tenant.name] += n_rows
        charge(several)

    monkeypatch.setattr(sim.core.turns.tenants, "charge", count)
    sim.tick(400)
    total = sum(weights.values())
    shares = {name: rows[name] / sum(rows.values()) for name in weights}
    assert shares == pytest.approx({name: w / total for name, w in weights.items()}, rel=0.25)


def test_a_level_of_priority_goes_before_shares_and_the_other_tenant_still_has_turns() -> None:
    sim = flooded(200, latency_s=0.1)
    n_ticks = n_ticks_to_first_token(sim, tenant="b", priority=1)
    assert sim.now > AGEING_S, "it waited for a level"
    assert n_ticks < 400


def test_a_request_of_a_tenant_that_streams_rises_too_while_others_are_more_urgent() -> None:
    sim = Simulator(n_ctx=2048, n_seq_max=4, n_batch=64, answer=endless, latency_s=0.1)
    stream = sim.submit(b"a stream of a", max_tokens=1500, tenant="a")
    sim.tick(3)
    for n in range(400):
        sim.submit(f"request {n} of b".encode(), max_tokens=4, tenant="b", priority=-1)
    waits = sim.submit(b"the next one of a", max_tokens=2, tenant="a")
    while not sim.tokens[waits]:
        sim.tick()
        assert sim.now < 4 * AGEING_S
    assert stream not in sim.finished


def test_an_old_request_of_little_priority_holds_up_no_other_of_its_tenant() -> None:
    sim = flooded(100, latency_s=0.1)
    sim.submit(b"in the background", max_tokens=400, tenant="b", priority=3)
    for _ in range(int(5 * AGEING_S / 0.1)):
        sim.tick()
    assert n_ticks_to_first_token(sim, tenant="b") <= 2


def test_a_tenant_with_little_to_do_saves_nothing_up() -> None:
    sim = Simulator(n_ctx=8192, n_seq_max=4, n_batch=64, answer=endless, latency_s=0.001)
    sim.submit(b"a long stream of a", max_tokens=5000, tenant="a")
    for n in range(1500):
        sim.submit(f"{n} of b".encode(), max_tokens=20, tenant="b")
    sim.tick(1000)
    for n in range(300):
        sim.submit(f"{n} of a".encode(), max_tokens=20, tenant="a")
    rows: Counter[str] = Counter()
    for _ in range(400):
        sim.tick()
        rows.update(s.request.tenant for s in sim.core.queue.running)
    assert rows["b"] > rows["a"] / 2


def test_the_oldest_of_all_is_never_preempted_for_room() -> None:
    sim = Simulator(
        n_ctx=120, n_seq_max=3, n_batch=16, answer=endless, prefix_cache_bytes=0,
        prefix_cache=False, tenant_weights={"a": 2.0},
    )  # fmt: skip
    oldest = sim.submit(b"the oldest, of b", max_tokens=60, tenant="b")
    for n in range(10):
        sim.submit(f"{n} of a".encode(), max_tokens=60, tenant="a")
    sim.run(at_most=5000)
    assert sim.finished[oldest].completion.timings.n_preemptions == 0
    assert sim.core.statistics().n_preemptions > 0
    sim.check_outcomes()


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 50)),
        min_size=1,
        max_size=12,
    )
)
def test_who_yields_leaves_no_tenant_with_less_than_the_one_that_comes(
    drawn: list[tuple[str, int, int]],
) -> None:
    several = [sequence_of(n, tenant=name, priority=level) for name, level, n in drawn]
    waiting, running = several[0], several[1:]
    left = list(running)
    own = waiting.tenant.name
    for victim in yielding(waiting, running):
        left.remove(victim)
        assert victim.tenant.name != own
        assert victim.request.priority >= waiting.request.priority
        assert names_of(left)[victim.tenant.name] >= names_of(running)[own] + 1


def names_of(sequences: list[RunningSequence]) -> Counter[str]:
    return Counter(s.tenant.name for s in sequences)


def test_a_tenant_that_comes_back_has_neither_saved_up_nor_got_rid_of_its_share() -> None:
    tenants = Tenants()
    a, b = tenants.enter("a"), tenants.enter("b")
    a.served, b.served = 100.0, 40.0
    tenants.leave(b)
    assert tenants.enter("b").served == 100.0, "time without requests is not saved up"
    tenants.leave(a)
    b.served = 60.0
    assert tenants.enter("a").served == 100.0, "nor forgotten by leaving"


def test_names_of_clients_are_remembered_up_to_a_limit() -> None:
    tenants = Tenants()
    stays = tenants.enter("stays")
    for n in range(N_REMEMBERED + 100):
        tenants.leave(tenants.enter(f"tenant {n}"))
    assert len(tenants._all) == N_REMEMBERED + 1
    tenants.leave(stays)
    assert not tenants._all


def test_the_tenant_that_is_furthest_behind_is_first() -> None:
    several = [sequence_of(1, tenant=name) for name in "abc"]
    for sequence, served in zip(several, (30.0, 10.0, 20.0), strict=True):
        sequence.tenant.served = served
    in_turn = sorted(several, key=by_turn(several, 0.0))
    assert [s.tenant.name for s in in_turn] == ["b", "c", "a"]
