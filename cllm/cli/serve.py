"""`cllm serve`: the HTTP server under its supervisor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from cllm import CllmError, EngineConfig


def serve(
    model: Annotated[
        Path | None,
        typer.Option(
            "-m", "--model", "--model-path", help="A GGUF file; by default the embedded one."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 18081,
    n_ctx: Annotated[int, typer.Option(help="KV cells in all; 0: the model's.")] = 4096,
    n_seq_max: Annotated[int, typer.Option(help="Requests that run at once.")] = 16,
    n_batch: Annotated[int, typer.Option(help="Rows of a tick.")] = 512,
    n_threads: Annotated[
        int | None, typer.Option(help="Compute threads; by default the physical cores.")
    ] = None,
    n_gpu_layers: Annotated[int, typer.Option(help="-1: all that fit.")] = -1,
    preflight: Annotated[
        bool | None,
        typer.Option(
            "--preflight/--no-preflight",
            help="Load the model in another process first; by default files not seen before.",
        ),
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; then 429.")] = 256,
    n_prefill_chunk: Annotated[
        int | None, typer.Option(help="Rows of a prompt in a tick that others wait for.")
    ] = None,
    target_itl_ms: Annotated[
        float | None, typer.Option(help="Pace that prompts keep for the streams.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="CLLM_API_KEY", help="Asked for as a bearer token.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A web page that may use the server.")
    ] = None,
    allow_grammar: Annotated[
        bool, typer.Option("--allow-grammar", help="Take raw GBNF; see SECURITY.md.")
    ] = False,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Put prompts into the log.")
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            envvar="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            help="Takes a span for each request, as OTLP over HTTP (extra tracing).",
        ),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds for what runs to finish after SIGTERM.")
    ] = 30.0,
    supervised: Annotated[
        bool,
        typer.Option("--supervise/--no-supervise", help="Restart the server when it is killed."),
    ] = True,
) -> None:
    """Serve a model over HTTP: /generate, OpenAI's endpoints, /docs."""
    try:
        from cllm.server.config import ServerConfig
        from cllm.server.logs import configure_logging
        from cllm.server.supervisor import listen, supervise
        from cllm.server.worker import serve as serve_here
    except ModuleNotFoundError as error:
        raise CllmError(f"{error.name} is not installed: pip install 'cllm[server]'") from None
    engine = EngineConfig(
        model=model,
        n_ctx=n_ctx,
        n_seq_max=n_seq_max,
        n_batch=n_batch,
        n_threads=n_threads,
        n_gpu_layers=n_gpu_layers,
        max_queue=max_queue,
        n_prefill_chunk=n_prefill_chunk,
        target_itl_ms=target_itl_ms,
        # Made by the engine of the worker, not here: the worker answers 503 meanwhile, it alone
        # knows when the model is in use, and one that is started again finds it remembered.
        preflight="unseen" if preflight is None else preflight,
    )
    config = ServerConfig(
        host=host,
        port=port,
        api_key=api_key,
        model_name=model_name,
        cors_origins=tuple(cors_origin or ()),
        allow_grammar=allow_grammar,
        log_prompts=log_prompts,
        otlp_traces_endpoint=otlp_traces_endpoint,
        drain_timeout_s=drain_timeout,
    )
    configure_logging()
    try:
        listener = listen(host, port)
    except OSError as error:
        raise CllmError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    with listener:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}"

        def announce() -> None:
            name = engine.model_path.name
            print(
                f"cllm: {name} at {address} (docs at {address}/docs)", file=sys.stderr, flush=True
            )

        os.environ.pop("CLLM_API_KEY", None)
        run = supervise if supervised else serve_here
        raise typer.Exit(run(engine, config, listener, announce))
