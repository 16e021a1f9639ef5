"""`cllm serve`: the HTTP server, and the engine in a process of its own."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from cllm import CllmError, EngineConfig, EngineOptions, InvalidArgumentError
from cllm.cli.imports import importing
from cllm.cli.options import TOY, EngineFlags, ServerFlags, with_flags
from cllm.errors import extra
from cllm.system import can_pass_descriptors

logger: logging.Logger = logging.getLogger("cllm.server")

N_CTX_FAKE = 16384  # of a server without a model


@with_flags(process=True)
def serve(
    server: ServerFlags,
    engine: EngineFlags,
    fake: Annotated[
        Path | None,
        typer.Option(
            metavar="RULES.yaml",
            help="Answer by rules, without a model, to test clients; also .toml and .json.",
        ),
    ] = None,
) -> int:
    """Serve a model over HTTP: /generate, OpenAI's endpoints, /docs."""
    # Child processes must not inherit the key.
    for name in ("CLLM_API_KEY", "CLLM_ADMIN_KEY"):
        os.environ.pop(name, None)
    process = bool(engine.given.get("process", can_pass_descriptors()))
    config = server.config()
    # While this process imports the server, that of the engine imports the engine.
    with _engine_process() if process and fake is None else nullcontext():
        with extra("server"), importing():
            from cllm.server.app import create_app
            from cllm.server.http.api_keys import read_keys
            from cllm.server.operation.logs import configure_logging
            from cllm.server.serving import check_certificate, listen
            from cllm.server.serving import serve as run
        # A file that crashes its loader ends only the engine's own process, which needs no preflight.
        options: EngineOptions = {"preflight": False if process else "unseen"}
        if not can_pass_descriptors():
            options["process"] = False
        if config.api_keys is not None:
            keys = read_keys(Path(config.api_keys))
            weights = {
                name: limits.weight for name, (_, limits) in keys.items() if limits.weight != 1
            }
            given = cast(Iterable[tuple[str, float]], engine.given.get("tenant_weights") or ())
            engine.given["tenant_weights"] = {**weights, **dict(given)}
        make_app: Callable[..., Any] = create_app
        if fake is not None:
            if engine.given.keys() & {"model", "hf"}:
                limit = "it has no model: leave out --model and -hf"
                raise typer.BadParameter(limit, param_hint="--fake")
            make_app = _app_of_rules(fake)
            config = replace(config, model_name=config.model_name or "fake")
            options["n_ctx"] = N_CTX_FAKE
        models = engine.configs(**options)
        if models:
            make_app = partial(_app_of_models, models)
            settings = next(iter(models.values()))
        else:
            settings = engine.config(**options)
        configure_logging()
        check_certificate(config)
        try:
            listener = listen(config)
        except (OSError, ValueError) as error:  # a label of a name may be too long
            where = config.uds or f"{config.host}:{config.port}"
            reason = getattr(error, "strerror", None) or error
            raise CllmError(f"cannot listen on {where}: {reason}") from None
        with listener:
            if config.is_open_to_the_network:
                _warn(
                    f"every client that reaches {config.shown_host} may use the model: there is no --api-key"
                )
            name = ", ".join(models) or (settings.model_path if fake is None else fake).name
            is_toy = settings.model is None and fake is None
            announce = partial(_announce, name, _address(config, listener), is_toy, config.page)
            return run(settings, config, listener, announce, make_app)


def _address(config: Any, listener: socket.socket) -> str:
    """Return the address for a browser, or the path of a Unix socket."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://{config.shown_host}:{listener.getsockname()[1]}"


def _warn(text: str) -> None:
    if os.environ.get("CLLM_LOG_FORMAT") == "json":
        logger.warning("%s", text)
    else:
        print(f"cllm: warning: {text}", file=sys.stderr)


def _announce(name: str, address: str, is_toy: bool, has_page: bool) -> None:
    page = f", page at {address}/" if has_page else ""
    pages = "" if address.startswith("unix:") else f" (docs at {address}/docs{page})"
    text = f"{name} at {address}{pages}"
    if os.environ.get("CLLM_LOG_FORMAT") == "json":
        logger.info("%s", text)
    else:
        print(f"cllm: {text}", file=sys.stderr, flush=True)
    if is_toy:
        logger.info("%s", TOY)


def _engine_process() -> AbstractContextManager[None]:
    try:
        from cllm.engine.process.spawn import spawning_ahead
    except ModuleNotFoundError:  # without the extra; the engine says so
        return nullcontext()
    return spawning_ahead()


def _app_of_models(models: dict[str, EngineConfig], _: object, config: Any, **__: object) -> Any:
    """Return an application of several models, each loaded at its first request."""
    from cllm.server.several import create_models_app

    return create_models_app(models, config)


def _app_of_rules(path: Path) -> Callable[..., Any]:
    """Return a replacement of `create_app` that answers by the rules of a file; reject an invalid file."""
    with extra("testing"):
        from cllm.testing.fake_rules import FakeRules
        from cllm.testing.fake_server import create_fake_app
    try:
        return partial(create_fake_app, FakeRules.read(path))
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--fake") from None
