"""Prometheus metrics: histograms of requests, and the engine's statistics, read at each scrape."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cllm import Completion, EngineStatistics

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
N_LATEST = 512
GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

GAUGES = {
    "requests_waiting": ("n_waiting", "Requests that wait for a seq_id"),
    "requests_running": ("n_running", "Requests with a seq_id"),
    "requests_paused": ("n_paused", "Requests whose reader has stopped, waiting or running"),
    "kv_cells": ("n_kv_cells", "KV cells in all"),
    "kv_cells_used": ("n_kv_cells_used", "KV cells of live requests"),
    "kv_cells_cached": ("n_kv_cells_cached", "KV cells of cached prefixes"),
    "prefix_host_bytes": ("n_prefix_bytes_host", "Prefixes in host memory"),
    "prefix_disk_bytes": ("n_prefix_bytes_disk", "Prefixes in files"),
    "sequences_used": ("n_seq_ids_used", "seq_ids of live requests"),
    "compute_threads": ("n_threads", "Compute threads: fewer while other programs are busy"),
    "waiting_texts": ("n_waiting_texts", "Texts that wait for their embedding"),
    "uptime_seconds": ("uptime_s", "Seconds since the engine was started"),
}
COUNTERS = {
    "ticks": ("n_ticks", "Ticks: batches decoded"),
    "prompt_tokens": ("n_prefill_tokens", "Prompt tokens computed"),
    "prompt_tokens_cached": ("n_cached_tokens", "Prompt tokens reused instead of computed"),
    "output_tokens": ("n_output_tokens", "Tokens sampled"),
    "drafted_tokens": ("n_drafted_tokens", "Draft tokens computed (speculation)"),
    "accepted_tokens": ("n_accepted_tokens", "Draft tokens accepted (speculation)"),
    "preemptions": ("n_preemptions", "Sequences sent back to the queue"),
    "swaps": ("n_swaps", "Preempted sequences whose cells were saved"),
    "evictions": ("n_evictions", "Cached prefixes evicted from the KV cache"),
    "restored_prefixes": ("n_restored_prefixes", "Requests with a prefix from memory or a file"),
    "checkpoints": ("n_checkpoints", "Checkpoints: states of one position kept for reuse"),
    "rebuilds": ("n_rebuilds", "Contexts recreated after a failure"),
    "restarts": ("n_restarts", "Engine processes started anew after a crash"),
    "discrepancies": ("n_discrepancies", "Discrepancies that audits found and repaired"),
    "embedded_texts": ("n_embedded_texts", "Texts embedded"),
    "embedded_tokens": ("n_embedded_tokens", "Tokens of embedded texts"),
    "embedding_batches": ("n_embedding_batches", "Batches of embedded texts"),
    "gil_handovers": ("n_gil_handovers", "Calls in ticks that released the GIL"),
}


class Metrics:
    """The metrics of one server.  Event loop only.

    Attributes
    ----------
    latest_ttfts, latest_gaps : deque of float
        Seconds: the time to first token of the latest 512 requests, and the latest 512 gaps between deltas.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._statistics: Callable[[], EngineStatistics] | None = None
        self.latest_ttfts: deque[float] = deque(maxlen=N_LATEST)
        self.latest_gaps: deque[float] = deque(maxlen=N_LATEST)
        self._gap_counts = [0] * (len(GAP_SECONDS) + 1)
        self._gap_sum_s = 0.0
        self._registry.register(self)

        def histogram(name: str, what: str) -> Histogram:
            return Histogram(f"cllm_{name}_seconds", what, buckets=SECONDS, registry=self._registry)

        self._ttft = histogram("time_to_first_token", "Submission to first token")
        self._queue = histogram("queue_time", "Submission to admission")
        self._total = histogram("request_duration", "Submission to the end of the request")
        self._http = Counter(
            "cllm_http_responses", "HTTP responses", ("route", "status"), registry=self._registry
        )
        self._cut_off = Counter(
            "cllm_stream_errors",
            "Streams that an error ended after their head",
            ("status",),
            registry=self._registry,
        )
        for status in ("500", "503"):  # a rate needs a value before the first error
            self._cut_off.labels(status)

    def watch(self, statistics: Callable[[], EngineStatistics] | None) -> None:
        """Report these statistics from now on; None reports none."""
        self._statistics = statistics

    def gap(self, seconds: float) -> None:
        """Record the seconds between a delta and the one before."""
        # Counted here: a `Histogram` of prometheus-client takes ten calls for each token.
        self._gap_counts[bisect_left(GAP_SECONDS, seconds)] += 1
        self._gap_sum_s += seconds
        self.latest_gaps.append(seconds)

    def finished(self, completion: Completion) -> None:
        """Record the times of a request that has a completion."""
        timings = completion.timings
        self._queue.observe(timings.queued_s)
        self._total.observe(timings.total_s)
        if timings.ttft_s is not None:
            self._ttft.observe(timings.ttft_s)
            self.latest_ttfts.append(timings.ttft_s)

    def given_up(self, seconds: float) -> None:
        """Record the duration of a request without a completion: its client has left, or it failed."""
        self._total.observe(seconds)

    def answered(self, route: str, status: int) -> None:
        """Count an HTTP response by the path of its route and its status."""
        self._http.labels(route, str(status)).inc()

    def cut_off(self, status: int) -> None:
        """Count a stream that an error ended after its head, by the status that the error has elsewhere."""
        self._cut_off.labels(str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def families(self) -> Iterable[Metric]:
        """Return all metrics with their samples."""
        return self._registry.collect()

    def collect(self) -> Iterator[Metric]:
        """Yield the gaps, and after `watch` the engine's counters and gauges; called by the registry."""
        limits = map(floatToGoString, (*GAP_SECONDS, math.inf))
        yield HistogramMetricFamily(
            "cllm_inter_token_latency_seconds",
            "Time between two deltas",
            buckets=list(zip(limits, accumulate(self._gap_counts), strict=True)),
            sum_value=self._gap_sum_s,
        )
        if self._statistics is None:
            return
        now = self._statistics()
        for name, (field, what) in GAUGES.items():
            yield GaugeMetricFamily(f"cllm_{name}", what, value=getattr(now, field))
        what = "KV cells of live requests, as a part of all: 0 to 1"
        yield GaugeMetricFamily("cllm_kv_cache_usage", what, value=now.kv_cache_usage)
        for name, (field, what) in COUNTERS.items():
            yield CounterMetricFamily(f"cllm_{name}", what, value=getattr(now, field))
        finished = CounterMetricFamily(
            "cllm_requests_finished", "Requests finished, by reason", labels=("reason",)
        )
        for reason, n_requests in now.n_finished.items():
            finished.add_metric([reason.value], n_requests)
        yield finished
        stages = CounterMetricFamily(
            "cllm_tick_seconds", "Seconds spent in each stage of all ticks", labels=("stage",)
        )
        for stage in ("plan", "decode", "sample", "detokenize", "deliver"):
            stages.add_metric([stage], getattr(now.tick_times, f"{stage}_s"))
        yield stages


@dataclass(frozen=True, eq=False)
class MetricsOfModels:
    """The metrics of a server of several models: samples of a model have its name as the label `model`.

    Attributes
    ----------
    server : Metrics
        Counts the responses to requests that reached no model.
    models : mapping
        Metrics by the name of the model.
    """

    server: Metrics
    models: Mapping[str, Metrics]

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterable[Metric]:
        """Return each metric once, with the samples of all models; called by the registry."""
        responses = "cllm_http_responses"
        own = (family for family in self.server.families() if family.name == responses)
        merged = {family.name: family for family in own}
        for name, metrics in self.models.items():
            for family in metrics.families():
                same = Metric(family.name, family.documentation, family.type)
                merged.setdefault(family.name, same).samples += [
                    sample._replace(labels={"model": name, **sample.labels})
                    for sample in family.samples
                ]
        return merged.values()


class AnswerCounter:
    """ASGI middleware: counts answers by route and status.

    Of several around each other, the innermost counts.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        has_begun = False
        counted: list[int] = scope.setdefault("cllm.counted", [])

        def count(status: int) -> None:
            if not counted:
                counted.append(status)
                # The path of the route, not of the request: strangers must not make labels.
                self._metrics.answered(getattr(scope.get("route"), "path", "none"), status)

        async def counting(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counting)
        except Exception:  # answered further out
            if not has_begun:
                count(500)
            raise
