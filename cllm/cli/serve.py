"""`cllm serve`: the HTTP server, and under it the engine in a process of its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cllm import CllmError, EngineConfig, EngineOptions, InvalidArgumentError
from cllm.cli.config_file import ConfigFile
from cllm.cli.imports import importing
from cllm.cli.options import TOY, EngineFlags, with_flags
from cllm.errors import extra

logger = logging.getLogger("cllm.server")

N_CTX_FAKE = 16384  # of a server without a model


@with_flags
def serve(
    engine: EngineFlags,
    _config: ConfigFile = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 18081,
    api_key: Annotated[
        str | None, typer.Option(envvar="CLLM_API_KEY", help="Asked for as a bearer token.")
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option("--model-name", "-a", "--alias", help="What clients call the model."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name by which clients may ask for this server; '*': any."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A web page that may use the server.")
    ] = None,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="A page at /, to chat and to look.")
    ] = True,
    fake: Annotated[
        Path | None,
        typer.Option(
            metavar="RULES.yaml",
            help="No model: answer as these rules say, for tests of clients; also .toml and .json.",
        ),
    ] = None,
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
    ping_interval: Annotated[
        float,
        typer.Option(min=0, help="Seconds after which a stream that waits says so; 0: never."),
    ] = 15.0,
    max_connections: Annotated[
        int | None,
        typer.Option(
            min=1, help="Idle ones are closed for more; by default 4096, or what fits the limit."
        ),
    ] = None,
    max_messages: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of one chat; by default 1024, or one for each 16 tokens of context."
        ),
    ] = None,
    max_body_bytes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Of one request; by default 4 MiB, or 64 for each token of context."
        ),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds for what runs to finish after SIGTERM.")
    ] = 30.0,
    keep_alive: Annotated[
        float,
        typer.Option(min=0, help="Of several models: seconds until one is freed that nobody uses."),
    ] = 300.0,
    max_models: Annotated[
        int | None,
        typer.Option(
            "--max-models",
            "--models-max",
            min=1,
            help="Of several models: so many are loaded at once; by default as many as memory allows.",
        ),
    ] = None,
    supervised: Annotated[
        bool | None,
        typer.Option(
            "--supervise/--no-supervise", help="Other names of --process and --no-process."
        ),
    ] = None,
) -> int:
    """Serve a model over HTTP: /generate, OpenAI's endpoints, /docs."""
    # The child is not to have it.
    os.environ.pop("CLLM_API_KEY", None)
    process = (supervised is not False) if engine.process is None else engine.process
    # While this process imports the server, that of the engine imports the engine.
    with _engine_process() if process and fake is None else nullcontext():
        with extra("server"), importing():
            from cllm.server.app import create_app
            from cllm.server.config import ServerConfig
            from cllm.server.logs import configure_logging
            from cllm.server.serving import listen
            from cllm.server.serving import serve as run
        # In a process of its own a file that ends it while it is loaded ends nothing else.
        options = EngineOptions(process=process, preflight=False if process else "unseen")
        make_app: Callable[..., Any] = create_app
        if fake is not None:
            make_app, model_name = _app_of_rules(fake), model_name or "fake"
            options["n_ctx"] = N_CTX_FAKE
        models = engine.configs(**options)
        if models:
            make_app = partial(_app_of_models, models)
            settings = next(iter(models.values()))
        else:
            settings = engine.config(**options)
        config = ServerConfig(
            host=host,
            port=port,
            api_key=api_key,
            model_name=model_name,
            allowed_hosts=tuple(allowed_host or ()),
            cors_origins=tuple(cors_origin or ()),
            page=page,
            log_prompts=log_prompts,
            otlp_traces_endpoint=otlp_traces_endpoint,
            ping_interval_s=ping_interval,
            max_connections=max_connections,
            max_messages=max_messages,
            max_body_bytes=max_body_bytes,
            drain_timeout_s=drain_timeout,
            model_keep_alive_s=keep_alive,
            max_models=max_models,
        )
        configure_logging()
        try:
            listener = listen(host, port)
        except OSError as error:
            raise CllmError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        with listener:
            shown = f"[{host}]" if ":" in host else host
            address = f"http://{shown}:{listener.getsockname()[1]}"

            if config.is_open_to_the_network:
                print(
                    f"cllm: warning: whoever reaches {shown} may use the model: there is no --api-key",
                    file=sys.stderr,
                )

            def announce() -> None:
                name = settings.model_path.name if fake is None else fake.name
                name = ", ".join(models) or name
                print(
                    f"cllm: {name} at {address} (docs at {address}/docs)",
                    file=sys.stderr,
                    flush=True,
                )
                if settings.model is None and fake is None:
                    logger.info("%s", TOY)

            return run(settings, config, listener, announce, make_app)


def _engine_process() -> AbstractContextManager[None]:
    try:
        from cllm.engine.process.spawn import spawning_ahead
    except ModuleNotFoundError:  # without the extra; the engine says so
        return nullcontext()
    return spawning_ahead()


def _app_of_models(models: dict[str, EngineConfig], _: object, config: Any, **__: object) -> Any:
    """An application of several models; what concerns one that cannot be loaded is told by its name."""
    from cllm.server.several import create_models_app

    return create_models_app(models, config)


def _app_of_rules(path: Path) -> Callable[..., Any]:
    """`create_app` of a server without a model."""
    with extra("testing"):
        from cllm.testing.fake_rules import FakeRules
        from cllm.testing.fake_server import create_fake_app
    try:
        return partial(create_fake_app, FakeRules.read(path))
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--fake") from None
