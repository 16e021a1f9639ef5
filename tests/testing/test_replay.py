"""A tick log is repeated to the batch and the event, faults and all, and a change is found."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cllm import Engine, EngineConfig
from cllm.engine.core.engine_core import EngineCore
from cllm.engine.core.messages import AddRequest, CancelRequest, ClearPrefixCache, Read
from cllm.engine.core.tick_log import LoggedDecoder, LoggedVocabulary, TickLog
from cllm.engine.sampling.logprobs import LogprobReader
from cllm.engine.sampling_params import SamplingOptions, SamplingParams
from cllm.errors import InvalidArgumentError
from cllm.testing import FakeVocabulary, replay
from cllm.testing.fake_decoder import Fault
from cllm.testing.reference import VOCABULARY, babble
from cllm.testing.simulator import Simulator
from tests.conftest import QUIET, submitted_together


class LoggedBench(Simulator):
    """A sim whose core is logged the way the inference thread does it."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.log = TickLog(path, clock=lambda: self.now)
        super().__init__(answer=babble, **options)

    def _make_core(self) -> EngineCore:
        self.log.header(self.config, self.kv_cache, self.decoder)
        return EngineCore(
            LoggedDecoder(self.decoder, self.log),
            LoggedVocabulary(VOCABULARY, self.log),
            self.kv_cache,
            self.log.calls("make_sampler", self._make_sampler),
            self.log.calls("read_logprob", LogprobReader(VOCABULARY, self.decoder.n_vocab).read),
            self.config,
            reader=self.decoder,
            clock=self.log.clock,
        )

    def ticks(self, n_ticks: int) -> None:
        for _ in range(n_ticks):
            self.core.tick()
            events = self.core.take_events()
            self.log.tick(events)
            self.core.queue.events = events
            self.hear()

    def obey(self, command: AddRequest | CancelRequest | Read | ClearPrefixCache) -> None:
        self.log.command(command)


def log_of(path: Path, number: int, **options: Any) -> LoggedBench:
    """A random life: requests, cancellations, slow readers, faults."""
    choose, goes_on = random.Random(number), random.Random(f"goes on {number}")
    sim = LoggedBench(path, **options)
    kinds: list[Fault] = [1, 2, -1, -3, "nan", RuntimeError("scripted")]
    for _ in range(12):
        for _ in range(choose.randint(0, 3)):
            prompt = b"shared head"[: choose.randint(0, 11)] + choose.randbytes(
                choose.randint(1, 9)
            )
            request_id = sim.submit(
                prompt[: sim.decoder.n_ctx_seq - 2],
                params=SamplingParams(
                    temperature=choose.choice([0.0, 1.0]),
                    max_tokens=choose.choice([None, 3, 20]),
                    stop=choose.choice([(), "ab"]),
                ),
                priority=choose.randint(-1, 1),
                generated=goes_on.choice([(), (), b"xy"]),
                timeout=choose.choice([None, None, 4.0]),
            )
            sim.obey(AddRequest(sim.requests[request_id]))
        if choose.random() < 0.3:
            alive = sorted(set(sim.requests) - set(sim.finished))
            for request_id in alive[:1]:
                sim.core.queue.cancel(request_id)
                sim.obey(CancelRequest(request_id))
        if choose.random() < 0.2:
            sim.core.manager.evict_all()
            sim.obey(ClearPrefixCache())
        if choose.random() < 0.5:
            sim.decoder.faults[sim.decoder.n_decodes + choose.randint(1, 3)] = choose.choice(kinds)
        if choose.random() < 0.2:
            n_calls = sim.decoder.n_calls["seq_rm"]
            sim.decoder.call_faults["seq_rm", n_calls + 1] = False
        sim.ticks(choose.randint(1, 8))
    sim.log.close()
    return sim


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {}, {"n_ctx": 48}, {"kv_unified": False}, {"prefix_cache": False, "n_ctx": 48},
        {"target_itl_ms": 50.0}, {"has_pos_min": False}, {"is_windowed": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_log_is_repeated_batch_by_batch_and_event_by_event(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    n_batches = 0
    for number in range(30):
        path = tmp_path / f"{number}.jsonl"
        sim = log_of(path, number, latency_s=0.01, **options)
        result = replay(path)
        assert result.differences == [], number
        # After a `seq_rm` that has failed, a batch may be refused before it is decoded.
        n_refused = path.read_text().count('"error":"PositionError"')
        assert result.n_batches == sim.decoder.n_decodes + n_refused
        n_batches += result.n_batches
    assert n_batches > 500


def changed(lines: list[dict[str, Any]], what: str) -> None:
    """Change one thing in the middle of a log."""
    ticks = [line["tick"] for line in lines if "tick" in line and line["tick"]["batches"]]
    tick = ticks[len(ticks) // 2]
    if what == "batch":
        tick["batches"][0]["runs"][0][1] += 1
    elif what == "event":
        next(e for t in ticks for e in t["events"] if e and e["text"])["text"] += "!"
    else:
        submit = next(line["submit"] for line in lines if "submit" in line)
        submit["prompt_token_ids"].append(1)


@pytest.mark.parametrize("what", ["batch", "event", "request"])
def test_a_replay_that_differs_says_where(tmp_path: Path, what: str) -> None:
    path = tmp_path / "ticks.jsonl"
    log_of(path, 7)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed(lines, what)
    path.write_text("\n".join(map(json.dumps, lines)))
    result = replay(path)
    (difference, *_) = result.differences
    assert difference.line > 1
    assert difference.recorded != difference.replayed
    with pytest.raises(
        AssertionError, match=f"differs at line {difference.line}, {difference.what}"
    ):
        result.check()


def test_a_file_that_is_no_tick_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    for text in ("", "{}\n", '{"tick": {}}\n'):
        path.write_text(text)
        with pytest.raises(ValueError, match="no header"):
            replay(path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ('{"format": "cllm tick log 0"}', "of the format 'cllm tick log 0', must be"),
        ("{}", "of the format None, must be"),
        ("5", "malformed in line 1"),
        ('{"format": "cllm tick log 8"}', "malformed in line 1.*kv_cache"),
        ('{"format": "cllm tick log 8", "kv_cache": 5}', "malformed in line 1"),
        ('{"format": "cllm tick log 8", "kv_cache": {"n_cells": 1}}', "malformed in line 1"),
    ],
)
def test_a_header_of_another_kind_is_refused_by_name(
    tmp_path: Path, wrong: str, message: str
) -> None:
    path = tmp_path / "ticks.jsonl"
    path.write_text('{"header": ' + wrong + "}\n")
    with pytest.raises(ValueError, match=r"ticks\.jsonl is .*" + message):
        replay(path)


@pytest.mark.parametrize(
    "wrong",
    [
        "5", "not JSON", "", "{}", '{"jump": true}', '{"cancel": 5}', '{"read": ["a"]}',
        '{"cancel": "a", "reset_prefix_cache": true}', '{"submit": {}}', '{"tick": {}}',
        '{"tick": {"batches": [{"runs": [[0, 0, 1]]}], "events": []}}',
        '{"tick": {"batches": [], "events": [{"id": "a"}]}}', '{"cancel": "a", "clock": 5}',
    ],
)  # fmt: skip
def test_a_line_that_no_log_has_is_refused_by_its_number(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "ticks.jsonl"
    log_of(path, 7)
    head, *rest = path.read_text().splitlines()
    path.write_text("\n".join([head, rest[0], wrong, *rest[1:], ""]))
    with pytest.raises(ValueError, match=r"ticks\.jsonl is malformed in line 3"):
        replay(path)


@pytest.mark.parametrize("n_lost", [1, 2, 20])
def test_a_log_that_ends_within_a_line_is_repeated_up_to_it(tmp_path: Path, n_lost: int) -> None:
    """The disk was full, or the process was killed; a newline alone is no loss."""
    path = tmp_path / "ticks.jsonl"
    log_of(path, 7)
    n_ticks = replay(path).n_ticks
    path.write_bytes(path.read_bytes()[:-n_lost])
    result = replay(path)
    result.check()
    assert result.n_ticks == n_ticks - (n_lost > 1)


@pytest.mark.anyio
async def test_a_long_prompt_beside_a_stream_is_cut_again_as_the_engine_cut_it(
    anyio_backend: str, tmp_path: Path
) -> None:
    """How many of its rows are polite depends on where the model computes."""
    path = tmp_path / "ticks.jsonl"
    async with Engine(n_ctx=2048, n_seq_max=2, tick_log=path, **QUIET) as engine:
        prompt = await engine.tokenize("37+58=" * 150)
        assert len(prompt) > 600
        with submitted_together(engine, 2):
            await engine.generate_all(["count:1..30", prompt], temperature=0, max_tokens=30)
    replay(path).check()


@pytest.mark.anyio
async def test_requests_that_went_on_after_given_tokens_go_on_again(
    anyio_backend: str, tmp_path: Path
) -> None:
    path = tmp_path / "ticks.jsonl"
    xtc: SamplingOptions = {"xtc_probability": 0.5, "xtc_threshold": 0.05}
    async with Engine(n_ctx=512, n_seq_max=2, tick_log=path, **QUIET) as engine:
        ids = await engine.tokenize("12, 3, ", add_special=False)
        for sampling in ({"temperature": 0.0}, {"seed": 1}, {"seed": 1, **xtc}):
            await engine.generate("count:", generated=ids, max_tokens=20, **sampling)
    replay(path).check()


@pytest.mark.anyio
async def test_a_log_that_cannot_be_written_is_refused_by_its_name(
    anyio_backend: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match="tick_log") as caught:
        async with Engine(n_ctx=256, n_seq_max=1, tick_log=tmp_path / "no" / "x", **QUIET):
            raise AssertionError("it started")
    assert caught.value.field == "tick_log"


@pytest.mark.anyio
async def test_a_log_on_a_full_disk_is_given_up_and_the_engine_goes_on(
    anyio_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Engine(n_ctx=256, n_seq_max=1, tick_log="/dev/full", **QUIET) as engine:
        assert (await engine.generate("1+1=", temperature=0)).text == "2"
    assert sum("the tick log ends here" in message for message in caplog.messages) == 1


@pytest.mark.anyio
async def test_a_request_id_may_be_used_again(anyio_backend: str, tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    async with Engine(n_ctx=256, n_seq_max=1, tick_log=path, **QUIET) as engine:
        for question in ("1+1=", "20+30="):
            await engine.generate(question, temperature=0, request_id="mine")
            await engine.audit()
    assert replay(path).differences == []


def test_a_text_that_failed_fails_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ticks.jsonl"
    sim = LoggedBench(path)
    request_id = sim.submit(b"xyz", params=SamplingParams(temperature=0, max_tokens=9))
    sim.obey(AddRequest(sim.requests[request_id]))

    def piece(vocabulary: FakeVocabulary, token: int) -> bytes:
        raise OverflowError("no such piece")

    with monkeypatch.context() as patch:
        patch.setattr(FakeVocabulary, "piece", piece)
        sim.ticks(3)
    sim.log.close()
    assert sim.failed() == {request_id}
    assert replay(path).differences == []


@pytest.mark.anyio
async def test_the_log_of_an_engine_is_repeated_without_a_model(
    anyio_backend: str, tmp_path: Path
) -> None:
    path = tmp_path / "ticks.jsonl"
    config = EngineConfig(
        n_ctx=256, n_seq_max=4, n_batch=16, tick_log=path, stream_buffer=3, **QUIET
    )
    async with Engine(config=config) as engine:
        async with engine.stream("count:1..99", temperature=0) as stream:
            await stream.__anext__()
        prompts = ["count:1..20", "count:1..21", "repeat:hello", "1+1="] * 3
        completions = await engine.generate_all(prompts, temperature=0.7, seed=5)
        n_ticks = engine.statistics().n_ticks
    result = replay(path)
    assert result.differences == []
    assert result.n_batches == n_ticks
    assert result.n_tokens >= sum(len(c.token_ids) for c in completions)
