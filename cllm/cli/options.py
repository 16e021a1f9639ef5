"""Options that several commands share: each is written down once and becomes a checked value.

A command takes `EngineFlags` or `SamplingFlags` as a parameter; `with_flags` shows typer their
fields as options in its place.  An option that is not given leaves the engine's own default.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, ClassVar, Unpack, cast, get_type_hints

import typer

from cllm import (
    EngineConfig,
    EngineOptions,
    InvalidArgumentError,
    InvalidRequestError,
    SamplingOptions,
    SamplingParams,
)

_ENGINE, _SAMPLING = EngineConfig(), SamplingParams()


def _engine(help: str, *names: str, default: object = None) -> object:
    return typer.Option(*names, help=help, show_default=_shown(default), rich_help_panel="Engine")


def _sampling(help: str, *names: str, default: object = None) -> object:
    shown = _shown(default)
    return typer.Option(*names, help=help, show_default=shown, rich_help_panel="Sampling")


def _shown(default: object) -> str | bool:
    return False if default is None else str(default)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """The options that become an `EngineConfig`; None: not given."""

    model: Annotated[
        Path | None,
        _engine("A GGUF file; by default the embedded model.", "-m", "--model", "--model-path"),
    ] = None
    n_ctx: Annotated[
        int | None,
        _engine(
            "KV cells in all; 0: as the model was trained.", "-c", "--n-ctx", default=_ENGINE.n_ctx
        ),
    ] = None
    n_seq_max: Annotated[int | None, _engine("Requests that run at once.", "--n-seq-max")] = None
    threads: Annotated[
        int | None,
        _engine(
            "Compute threads; by default the physical cores.", "-t", "--threads", "--n-threads"
        ),
    ] = None
    n_batch: Annotated[
        int | None, _engine("Rows of a tick.", "--n-batch", default=_ENGINE.n_batch)
    ] = None
    n_ubatch: Annotated[
        int | None,
        _engine("Rows of a physical batch.", "--n-ubatch", default=_ENGINE.n_ubatch),
    ] = None
    n_gpu_layers: Annotated[
        int | None, _engine("Layers on the GPU; by default all that fit.", "--n-gpu-layers")
    ] = None
    flash_attn: Annotated[
        bool | None,
        _engine("By default llama.cpp decides.", "--flash-attn/--no-flash-attn"),
    ] = None
    type_k: Annotated[
        str | None, _engine("Data type of the keys.", "--type-k", default=_ENGINE.type_k)
    ] = None
    type_v: Annotated[
        str | None, _engine("Data type of the values.", "--type-v", default=_ENGINE.type_v)
    ] = None

    def config(self, **defaults: Unpack[EngineOptions]) -> EngineConfig:
        """The settings: those given, then `defaults`, then the engine's own.

        Raises
        ------
        typer.BadParameter
            Says which value cannot be used, and the limit.
        """
        given = {name: value for name, value in _values(self).items() if value is not None}
        # The embedded model is too small to share between threads.
        threads = given.pop("threads", None if "model" in given else 1)
        options: dict[str, object] = {
            **defaults,
            "n_threads": threads,
            "n_threads_batch": threads,
            **given,
        }
        model = cast("Path | None", options.pop("model", None))
        try:
            return EngineConfig(model=model, **cast(EngineOptions, options))
        except InvalidArgumentError as error:
            raise typer.BadParameter(str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """The options that become `SamplingParams`; None: not given."""

    files: ClassVar = ("json_schema", "grammar")

    max_tokens: Annotated[
        int | None,
        _sampling("By default until the model ends or the context is full.", "-n", "--max-tokens"),
    ] = None
    min_tokens: Annotated[
        int | None, _sampling("No end before so many tokens.", "--min-tokens")
    ] = None
    temperature: Annotated[
        float | None,
        _sampling("0 is greedy.", "--temperature", "--temp", default=_SAMPLING.temperature),
    ] = None
    top_k: Annotated[
        int | None,
        _sampling("Keep the k most likely tokens; 0: all.", "--top-k", default=_SAMPLING.top_k),
    ] = None
    top_p: Annotated[
        float | None,
        _sampling("Keep so much of the probability.", "--top-p", default=_SAMPLING.top_p),
    ] = None
    min_p: Annotated[
        float | None,
        _sampling("Drop what is so much less likely.", "--min-p", default=_SAMPLING.min_p),
    ] = None
    repeat_penalty: Annotated[
        float | None, _sampling("1 is off.", "--repeat-penalty", default=_SAMPLING.repeat_penalty)
    ] = None
    presence_penalty: Annotated[
        float | None,
        _sampling("0 is off.", "--presence-penalty", default=_SAMPLING.presence_penalty),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _sampling("0 is off.", "--frequency-penalty", default=_SAMPLING.frequency_penalty),
    ] = None
    seed: Annotated[int | None, _sampling("By default a random one.", "--seed")] = None
    stop: Annotated[
        list[str] | None, _sampling("Text that ends the output; may be repeated.", "--stop")
    ] = None
    ignore_eos: Annotated[
        bool | None, _sampling("Never sample an end-of-generation token.", "--ignore-eos")
    ] = None
    json_schema: Annotated[
        str | None, _sampling("The output is JSON of this schema; text or @FILE.", "--json-schema")
    ] = None
    regex: Annotated[str | None, _sampling("The whole output matches it.", "--regex")] = None
    grammar: Annotated[
        str | None, _sampling("The output follows this GBNF; text or @FILE.", "--grammar")
    ] = None

    def params(self) -> SamplingParams:
        """The parameters, with the engine's own defaults for what was not given.

        Raises
        ------
        typer.BadParameter
            Says which value cannot be used, and the limit; or which file cannot be read.
        """
        # Typer has [] or None, by version, for a list that is not given.
        given = {name: value for name, value in _values(self).items() if value not in (None, [])}
        for name in self.files:
            if name in given:
                given[name] = text_or_file(str(given[name]), f"--{name.replace('_', '-')}")
        try:
            return SamplingParams(**cast(SamplingOptions, given))
        except InvalidRequestError as error:
            raise typer.BadParameter(str(error)) from None


def text_or_file(given: str, option: str) -> str:
    """The text, or what the file holds that `@FILE` names.

    Raises
    ------
    typer.BadParameter
        The file cannot be read as UTF-8.
    """
    if not given.startswith("@"):
        return given
    path = Path(given[1:])
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        problem = error.strerror or str(error)
    except UnicodeDecodeError:
        problem = "it is not UTF-8"
    raise typer.BadParameter(f"cannot read {path}: {problem}", param_hint=option)


def with_flags(command: Callable[..., int]) -> Callable[..., int]:
    """The command as typer sees it: every field of its flags is an option of its own."""
    hints = get_type_hints(command, include_extras=True)
    flags = {name: hint for name, hint in hints.items() if hint in (EngineFlags, SamplingFlags)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in flags:
            parameters += _parameters(flags[name])
        else:
            parameters.append(
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
            )

    @wraps(command)
    def run(**given: object) -> int:
        for name, kind in flags.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        return command(**given)

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    return run


def _parameters(kind: type[EngineFlags | SamplingFlags]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]


def _values(flags: EngineFlags | SamplingFlags) -> dict[str, object]:
    return {field.name: getattr(flags, field.name) for field in fields(flags)}
