"""`cllm bench`: what is measured is what was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from cllm import Engine, SamplingParams, TokenDelta
from cllm.cli.bench import Bench, Sample, Workload
from cllm.cli.bench_report import percentile
from cllm.engine.llama.tuner import Tuner
from tests.cli.children import ROOT, run_cllm

SHORT = ("--concurrency", "1,3", "--prompt-tokens", "8", "--max-tokens", "5", "--requests", "4")


def test_json_has_the_machine_the_model_and_every_concurrency() -> None:
    done = run_cllm("bench", *SHORT, "--json", "--threads", "1")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["model"]["name"] == "cllm-tiny"
    assert report["machine"]
    assert (report["prompt_tokens"], report["max_tokens"], report["n_seq_max"]) == (8, 5, 3)
    assert [level["concurrency"] for level in report["levels"]] == [1, 3]
    for level in report["levels"]:
        assert level["n_requests"] == 4
        n_output = level["output_tokens_per_s"] * level["elapsed_s"]
        n_prompt = level["prompt_tokens_per_s"] * level["elapsed_s"]
        assert (round(n_output), round(n_prompt)) == (20, 32)
        assert 0 < level["ttft_p50_ms"] <= level["ttft_p99_ms"]
        assert 0 < level["itl_p50_ms"] <= level["itl_p99_ms"]


def test_the_table_names_the_model_and_has_a_line_for_each_concurrency() -> None:
    done = run_cllm("bench", *SHORT, "--max-tokens", "1")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("cllm-tiny")
    assert "1 compute thread" in lines[1]
    assert [line.split()[:2] for line in lines[-2:]] == [["1", "4"], ["3", "4"]]
    assert lines[-1].split()[-1] == "–", "one token has no time to the next"


def test_the_report_has_the_settings_that_tuning_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = {"n_threads": 2, "repack": False}
    monkeypatch.setattr(Tuner, "settings", lambda self: tuned)
    report = json.loads(run_cllm("bench", *SHORT, "--json").stdout)
    assert (report["tuned"], report["n_threads"]) == (tuned, 2)


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    done = run_cllm("bench", *SHORT, "--plot", str(path))
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_line_says_so_and_the_rest_is_done(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from tests.cli.children import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", *SHORT, "--plot", str(path)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == "cllm: no picture without the extra plot: pip install 'cllm[plot]'\n"
    assert len(done.stdout.splitlines()) > 4
    assert not path.exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,x"], "--concurrency"),
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "300"], "--concurrency"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--requests", "0"], "--requests"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = run_cllm("bench", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.full
def test_a_plot_that_cannot_be_saved_is_refused_before_the_measurement(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in (tmp_path / "plot.what", tmp_path / "nowhere" / "plot.png"):
        done = run_cllm("bench", "--plot", str(path))
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1


def test_a_prompt_that_does_not_fit_is_one_line_and_exit_code_1() -> None:
    done = run_cllm("bench", "--n-ctx", "256", "--prompt-tokens", "300")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "cllm: prompt is too long: 300 tokens > 256 maximum; "
        "this model's maximum context length is 256 tokens\n"
    )


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (50, 99)] == [50.0, 99.0]
    assert percentile([7.0], 99) == 7.0


# --- The closed loop -------------------------------------------------------------------------
class Counting:
    """An engine that sees how many requests there are at once."""

    model = SimpleNamespace(n_vocab=1000)

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.at_once: list[int] = []
        self._n_open = 0

    def stream(self, prompt: list[int], params: SamplingParams) -> Any:
        engine = self
        assert params.ignore_eos

        class Stream:
            async def __aenter__(self) -> Any:
                engine.prompts.append(tuple(prompt))
                engine._n_open += 1
                engine.at_once.append(engine._n_open)
                return self

            async def __aexit__(self, *exc: object) -> None:
                engine._n_open -= 1

            async def __aiter__(self) -> AsyncIterator[TokenDelta]:
                for token in range(params.max_tokens or 0):
                    await anyio.lowlevel.checkpoint()
                    yield TokenDelta("x", (token,))

        return Stream()


@pytest.mark.anyio
async def test_so_many_requests_are_open_at_once_and_no_two_prompts_are_alike() -> None:
    engine, seen = Counting(), list[int]()
    workload = Workload(concurrencies=(2, 5), n_prompt=6, n_output=3, n_requests=10)
    levels = await Bench(cast(Engine, engine), workload, seen.append).run()
    n_first = 2 + 10  # the warm-up, and what is measured
    assert max(engine.at_once[:n_first]) == 2
    assert max(engine.at_once[n_first:]) == 5
    assert len(set(engine.prompts)) == len(engine.prompts) == n_first + 5 + 10
    assert {len(prompt) for prompt in engine.prompts} == {6}
    assert seen == list(range(1, 21)), "a warm-up is not counted"
    assert [level.n_requests for level in levels] == [10, 10]


def test_a_level_is_made_of_its_requests() -> None:
    sample = Sample(
        n_prompt_tokens=30, n_output_tokens=10, ttfts_s=[0.1, 0.2, 0.3], itls_s=[0.01, 0.02]
    )
    level = sample.level(3, elapsed_s=2.0)
    assert (level.output_tokens_per_s, level.prompt_tokens_per_s) == (5.0, 15.0)
    assert (level.ttft_p50_ms, level.ttft_p99_ms) == (200.0, 300.0)
    assert (level.itl_p50_ms, level.itl_p99_ms) == (10.0, 20.0)
