"""OpenTelemetry: a span for each request, with its time in the queue, the prefill and the decode.

Spans are exported only with an endpoint, or with a global tracer provider in a program that embeds the
application.  Prompts and answers are in no span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from cllm import Completion, FinishReason, SamplingParams, __version__
from cllm.errors import extra

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

CLOSE_S = 3.0
NS = 1_000_000_000
FINISH_REASONS = "gen_ai.response.finish_reasons"


class Trace:
    """The span of one request while it runs."""

    def __init__(self, tracer: Tracer, span: Span, started_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._started_ns = started_ns

    def finished(self, completion: Completion) -> None:
        """Record the usage and the times of an ended request in its span."""
        usage, timings = completion.usage, completion.timings
        latencies = {
            "gen_ai.latency.time_in_queue": timings.queued_s,
            "gen_ai.latency.time_to_first_token": timings.ttft_s,
            "gen_ai.latency.e2e": timings.total_s,
        }
        self._span.set_attributes(
            {
                FINISH_REASONS: [str(completion.finish_reason)],
                "gen_ai.usage.input_tokens": usage.n_prompt,
                "gen_ai.usage.output_tokens": usage.n_output,
                "cllm.usage.cached_tokens": usage.n_cached,
                "cllm.n_preemptions": timings.n_preemptions,
                **{name: seconds for name, seconds in latencies.items() if seconds is not None},
            }
        )
        self._parts(queued=timings.queued_s, prefill=timings.prefill_s, decode=timings.decode_s)

    def _parts(self, **seconds: float | None) -> None:
        """Write the spans of queue, prompt and answer, one after another."""
        from opentelemetry.trace import set_span_in_context

        parent, at_ns = set_span_in_context(self._span), self._started_ns
        for name, took_s in seconds.items():
            if took_s is not None:
                part = self._tracer.start_span(name, parent, start_time=at_ns)
                at_ns += int(took_s * NS)
                part.end(at_ns)


class Tracing:
    """Source of spans.

    Parameters
    ----------
    endpoint : str, optional
        URL of a collector for OTLP over HTTP; None: the program's global tracer provider, if it has one.

    Raises
    ------
    MissingExtraError
        An endpoint is given, but the extra `tracing` is not installed.
    """

    def __init__(self, endpoint: str | None = None) -> None:
        self._provider: Any = None
        self._exporter: Any = None
        if endpoint is not None:
            self._provider, self._exporter = _exporting_to(endpoint)
        self._tracer: Tracer | None = None
        try:
            from opentelemetry import trace
        except ModuleNotFoundError:
            return
        self._tracer = trace.get_tracer("cllm", __version__, self._provider)

    @contextmanager
    def request(
        self,
        request_id: str,
        headers: Mapping[str, str],
        *,
        operation: str,
        model: str,
        params: SamplingParams,
        started_ns: int,
    ) -> Iterator[Trace | None]:
        """Yield the span of a request, in the trace that its headers name; None if no program gets its spans.

        The span ends with the block.  An `Exception` of the block becomes its status, a cancellation its finish
        reason.  `started_ns` is the Unix time in nanoseconds.
        """
        if self._tracer is None:
            yield None
            return
        from opentelemetry import trace
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode

        # A stand-in, while the program has no provider: spans would be dropped.
        is_stand_in = isinstance(self._tracer, getattr(trace, "ProxyTracer", ()))
        if is_stand_in and isinstance(
            trace.get_tracer_provider(), getattr(trace, "ProxyTracerProvider", ())
        ):
            yield None
            return

        asked: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "cllm",
            "gen_ai.request.model": model,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.id": request_id,
        }
        if params.max_tokens is not None:
            asked["gen_ai.request.max_tokens"] = params.max_tokens
        with self._tracer.start_as_current_span(
            f"{operation} {model}",
            extract(headers),
            kind=SpanKind.SERVER,
            attributes=asked,
            start_time=started_ns,
            record_exception=False,  # its message may quote what the caller wrote
            set_status_on_exception=False,
        ) as span:
            try:
                yield Trace(self._tracer, span, started_ns)
            except Exception as error:
                span.set_status(StatusCode.ERROR, type(error).__name__)
                raise
            except BaseException:  # the client has left
                span.set_attribute(FINISH_REASONS, [str(FinishReason.CANCELLED)])
                raise

    async def aclose(self) -> None:
        """Send the remaining spans; those that the collector has not taken after 3 s are dropped."""
        if self._provider is not None:
            with anyio.move_on_after(CLOSE_S, shield=True) as scope:
                await anyio.to_thread.run_sync(self._provider.shutdown, abandon_on_cancel=True)
            if scope.cancelled_caught:
                self._exporter.shutdown()  # otherwise the exporter goes on with its retries


def _exporting_to(endpoint: str) -> tuple[Any, Any]:
    with extra("tracing"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    # `create` adds OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES; `service.version` stays ours.
    provider = TracerProvider(
        resource=Resource.create({"service.version": __version__}),
        shutdown_on_exit=False,  # `aclose` shuts it down
    )
    exporter = OTLPSpanExporter(endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter
