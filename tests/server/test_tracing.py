"""Spans as a collector gets them: the real exporter, over HTTP, from a real server."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from cllm import CllmError, SamplingParams
from cllm.server.operation.tracing import Tracing
from tests.server.conftest import Server, ask, hasty, streaming

pytestmark = pytest.mark.full

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    def named(self, name: str) -> list[Span]:
        """The spans of this name so far."""
        return [span for span in self.spans if span.name == name]


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        message = ExportTraceServiceRequest()
        message.ParseFromString(body)
        self.server.spans += [
            span
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


@contextmanager
def traced(path: Path) -> Iterator[tuple[Server, Collector]]:
    """A server and where its spans go; what it has not sent it sends when it ends."""
    with collecting() as collector, hasty(path, otlp_traces_endpoint=collector.endpoint) as server:
        yield server, collector


def attributes_of(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def test_a_request_is_a_span_with_its_parts_in_the_caller_s_trace(tmp_path: Path) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "X-Request-ID": "traced"}
    with traced(tmp_path / "log") as (server, collector):
        with server.client(headers=headers) as client:
            assert ask(client, "repeat:secret", max_tokens=20).status_code == 200
        assert server.stop() == 0
        (span,) = collector.named("text_completion cllm-tiny")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert span.kind == Span.SPAN_KIND_SERVER
    found = attributes_of(span)
    assert found["gen_ai.response.id"] == "traced"
    assert found["gen_ai.request.max_tokens"] == 20
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert found["gen_ai.usage.input_tokens"] == len("repeat:secret") + 1
    assert found["gen_ai.usage.output_tokens"] == len("secret") + 2
    assert 0 < found["gen_ai.latency.time_to_first_token"] < found["gen_ai.latency.e2e"]
    parts = [s for s in collector.spans if s.parent_span_id == span.span_id]
    assert [part.name for part in parts] == ["queued", "prefill", "decode"]
    for before, after in itertools.pairwise(parts):
        assert before.start_time_unix_nano <= before.end_time_unix_nano
        assert before.end_time_unix_nano == after.start_time_unix_nano
    assert parts[0].start_time_unix_nano == span.start_time_unix_nano
    assert not any(b"secret" in s.SerializeToString() for s in collector.spans)


def test_each_choice_of_a_chat_has_a_span(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "1+1="}], "n": 3, "max_tokens": 4}
    with traced(tmp_path / "log") as (server, collector):
        with server.client() as client:
            assert client.post("/v1/chat/completions", json=body).status_code == 200
        assert server.stop() == 0
        assert len(collector.named("chat cllm-tiny")) == 3


def test_who_leaves_has_a_span_that_says_so(tmp_path: Path) -> None:
    with traced(tmp_path / "log") as (server, collector):
        with server.client() as client, streaming(client):
            pass
        server.wait_idle()
        assert server.stop() == 0
        (span,) = collector.named("text_completion cllm-tiny")
    assert attributes_of(span)["gen_ai.response.finish_reasons"] == ["cancelled"]


def test_a_collector_that_is_away_costs_no_answer(tmp_path: Path) -> None:
    with collecting() as collector:
        endpoint = collector.endpoint
    with hasty(tmp_path / "log", otlp_traces_endpoint=endpoint) as server:
        assert server.generate("1+1=").json()["text"] == "2"
        assert server.stop(timeout_s=30) == 0  # it may try again a while


def test_a_failure_is_a_status_without_the_words_of_its_message() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    processor = pytest.importorskip("opentelemetry.sdk.trace.export").SimpleSpanProcessor
    exporter = export.InMemorySpanExporter()
    tracing = Tracing()
    provider = sdk.TracerProvider()
    provider.add_span_processor(processor(exporter))
    tracing._tracer = provider.get_tracer("test")
    with (
        pytest.raises(CllmError),
        tracing.request(
            "id", {}, operation="chat", model="m", params=SamplingParams(), started_ns=1
        ),
    ):
        raise CllmError("secret")
    (span,) = exporter.get_finished_spans()
    assert span.status.description == "CllmError"
    assert int(span.status.status_code.value) == Status.STATUS_CODE_ERROR
    assert "secret" not in span.to_json()
    provider.shutdown()


def test_a_provider_of_the_program_that_comes_later_gets_the_spans() -> None:
    """In a process of its own, because a program has one provider for ever."""
    pytest.importorskip("opentelemetry.sdk.trace")
    program = """
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from cllm import SamplingParams
        from cllm.server.operation.tracing import Tracing

        def is_traced(tracing):
            asked = {"operation": "chat", "model": "m", "params": SamplingParams(), "started_ns": 1}
            with tracing.request("id", {}, **asked) as found:
                return found is not None and found._span.is_recording()

        tracing = Tracing()
        assert not is_traced(tracing)
        trace.set_tracer_provider(TracerProvider())
        assert is_traced(tracing)
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_nothing_is_traced_unless_it_is_asked_for(server: Server) -> None:
    assert server.generate("1+1=").json()["text"] == "2"
    with Tracing().request(
        "id", {}, operation="chat", model="m", params=SamplingParams(), started_ns=1
    ) as trace:
        assert trace is None
