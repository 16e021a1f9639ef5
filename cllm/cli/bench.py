"""`cllm bench`: how fast this machine runs a model, for several numbers of requests at once.

The load is a closed loop: each client sends its next request when it has the whole answer to the last.
Prompts are random token ids, so that they share no long prefix; every output has the requested length.
Times are those that a client sees on the event loop.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console

from cllm import Engine, EngineConfig, SamplingParams
from cllm.cli.bench_report import Level, about, as_json, percentile, save_plot, table
from cllm.cli.doctor import PlotOption, drawable
from cllm.cli.options import EngineFlags, with_flags
from cllm.cli.terminal import StandardOutput, is_terminal, loaded, note, progress_bar, run
from cllm.cli.texts import visible

MAX_CONCURRENCY = 256


@dataclass(frozen=True, slots=True)
class Workload:
    """Load of the engine.

    Attributes
    ----------
    concurrencies : tuple of int
        Numbers of clients to measure, one after the other.
    n_prompt, n_output : int
        Tokens of each prompt and of each output.
    n_requests : int or None
        Measured requests for each concurrency; None: four for each client, at least 16.
    """

    concurrencies: tuple[int, ...]
    n_prompt: int
    n_output: int
    n_requests: int | None

    def requests_at(self, concurrency: int) -> int:
        """Return the number of measured requests at one concurrency."""
        return max(16, 4 * concurrency) if self.n_requests is None else self.n_requests

    @property
    def n_cells(self) -> int:
        """Number of KV cells for the highest concurrency, rounded up to a multiple of 256."""
        n_cells = max(self.concurrencies) * (self.n_prompt + self.n_output)
        return -(-n_cells // 256) * 256


@dataclass(slots=True)
class Sample:
    """Measurements at one concurrency so far."""

    n_prompt_tokens: int = 0
    n_output_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    itls_s: list[float] = field(default_factory=list)

    def level(self, concurrency: int, elapsed_s: float) -> Level:
        """Return the throughput, and the percentiles of the times."""
        return Level(
            concurrency=concurrency,
            n_requests=len(self.ttfts_s),
            elapsed_s=elapsed_s,
            output_tokens_per_s=self.n_output_tokens / elapsed_s,
            prompt_tokens_per_s=self.n_prompt_tokens / elapsed_s,
            ttft_p50_ms=1000 * percentile(self.ttfts_s, 50),
            ttft_p99_ms=1000 * percentile(self.ttfts_s, 99),
            itl_p50_ms=1000 * percentile(self.itls_s, 50) if self.itls_s else None,
            itl_p99_ms=1000 * percentile(self.itls_s, 99) if self.itls_s else None,
        )


class Bench:
    """Runs a workload on an engine.

    Parameters
    ----------
    on_request : callable
        Called after each measured request with the number of measured requests so far.
    """

    def __init__(
        self, engine: Engine, workload: Workload, on_request: Callable[[int], None]
    ) -> None:
        self._engine = engine
        self._workload = workload
        self._on_request = on_request
        self._n_measured = 0
        self._random = random.Random(1)
        self._params = SamplingParams(temperature=0, max_tokens=workload.n_output, ignore_eos=True)

    async def run(self) -> list[Level]:
        """Measure each concurrency after a warm-up with one request per client; return the results."""
        levels = []
        for concurrency in self._workload.concurrencies:
            await self._loop(concurrency, self._prompts(concurrency), Sample(), lambda: None)
            prompts = self._prompts(self._workload.requests_at(concurrency))
            sample, started_at = Sample(), time.perf_counter()
            await self._loop(concurrency, prompts, sample, self._count)
            levels.append(sample.level(concurrency, time.perf_counter() - started_at))
        return levels

    def _count(self) -> None:
        self._n_measured += 1
        self._on_request(self._n_measured)

    async def _loop(
        self,
        concurrency: int,
        prompts: list[list[int]],
        sample: Sample,
        on_request: Callable[[], None],
    ) -> None:
        async def ask() -> None:
            while prompts:
                await self._request(prompts.pop(), sample)
                on_request()

        async with anyio.create_task_group() as clients:
            for _ in range(concurrency):
                clients.start_soon(ask)

    def _prompts(self, n: int) -> list[list[int]]:
        """Return random prompts, drawn with a fixed seed: each run of a command has the same ones."""
        vocabulary = range(self._engine.model.n_vocab)
        return [self._random.choices(vocabulary, k=self._workload.n_prompt) for _ in range(n)]

    async def _request(self, prompt: list[int], sample: Sample) -> None:
        last = time.perf_counter()
        n_output = 0
        async with self._engine.stream(prompt, self._params) as stream:
            async for delta in stream:
                if not delta.token_ids:
                    continue
                now = time.perf_counter()
                (sample.itls_s if n_output else sample.ttfts_s).append(now - last)
                n_output += len(delta.token_ids)
                last = now
        sample.n_prompt_tokens += len(prompt)
        sample.n_output_tokens += n_output


async def _bench(
    config: EngineConfig, workload: Workload, prints_json: bool, plot: Path | None
) -> int:
    n_total = sum(map(workload.requests_at, workload.concurrencies))
    async with loaded(Engine(config=config)) as engine:
        with progress_bar(is_terminal(sys.stderr)) as show:
            levels = await Bench(
                engine, workload, lambda n_done: show(n_done, n_total, "requests")
            ).run()
        model = engine.model
    config = config.tuned(model.tuned)
    if prints_json:
        settings = {"prompt_tokens": workload.n_prompt, "max_tokens": workload.n_output}
        await StandardOutput().write(as_json(config, model, settings, levels))
    else:
        console = Console(highlight=False)
        for line in about(config, model):
            console.print(visible(line), style="dim", markup=False, soft_wrap=True)
        console.print(table(levels))
    if plot is not None:
        save_plot(plot, levels, title="\n".join(about(config, model)))
        note(f"The plot is in {plot}.")
    return 0


def _concurrencies(given: str) -> tuple[int, ...]:
    """Return the distinct numbers of a comma-separated list in ascending order, or raise `BadParameter`."""
    try:
        numbers = sorted({int(number) for number in given.split(",")})
    except ValueError:
        numbers = [0]
    if not 1 <= numbers[0] <= numbers[-1] <= MAX_CONCURRENCY:
        limit = f"numbers from 1 to {MAX_CONCURRENCY} with commas between"
        raise typer.BadParameter(f"{given!r} is not {limit}", param_hint="--concurrency")
    return tuple(numbers)


@with_flags(n_seq_max=None, max_queue=MAX_CONCURRENCY, prefix_cache=False)
def bench(
    engine: EngineFlags,
    concurrency: Annotated[
        str, typer.Option(help="Requests at once: numbers separated by commas.")
    ] = "1,4,8,16",
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each prompt, drawn at random.")
    ] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each output.")] = 32,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests for each concurrency; by default 4 times that, at least 16."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: PlotOption = None,
) -> int:
    """Measure throughput and latency of this machine and model."""
    workload = Workload(_concurrencies(concurrency), prompt_tokens, max_tokens, requests)
    config = engine.config(
        n_ctx=workload.n_cells,
        n_seq_max=max(workload.concurrencies),
    )
    return run(_bench, config, workload, as_json, drawable(plot))
