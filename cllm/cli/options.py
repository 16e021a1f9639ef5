"""Options that several commands share: each is written down once and becomes a checked value.

A command takes `EngineFlags` or `SamplingFlags` as a parameter; `with_flags` shows typer their
fields as options in its place.  An option that is not given leaves the engine's own default.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, Unpack, cast, get_type_hints

import typer

from cllm import (
    EngineConfig,
    EngineOptions,
    InvalidArgumentError,
    InvalidRequestError,
    SamplingOptions,
    SamplingParams,
)
from cllm.hub.download import find_model
from cllm.hub.names import PREFIX, is_name

NAMED = re.compile(r"([\w.-]+)=(.+)")
TOY = (
    "the embedded model is a toy of 0.9 million parameters, made for tests; "
    "-m FILE or -m hf:USER/REPO takes a real one"
)
_ENGINE, _SAMPLING = EngineConfig(), SamplingParams()


def _engine(help: str, *names: str, default: object = None) -> Any:
    return typer.Option(*names, help=_helped(help, default), rich_help_panel="Engine")


def _sampling(help: str, *names: str, default: object = None) -> Any:
    return typer.Option(*names, help=_helped(help, default), rich_help_panel="Sampling")


def _helped(help: str, default: object) -> str:
    # Not typer's own: a default that the command does not have it puts into brackets of its own.
    # The bracket is no markup.
    return help if default is None else rf"{help} \[default: {default}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """The options that become an `EngineConfig`: those of every command; None: not given.

    The one table of them: `options_table` writes it for the documentation.
    """

    model: Annotated[
        list[str] | None,
        _engine(
            "A GGUF file, or hf:USER/REPO[:QUANT], which is downloaded once; by default the embedded model. "
            "Of `serve` NAME=MODEL too, several times: each is loaded when it is asked for.",
            "-m", "--model", "--model-path",
        ),
    ] = None  # fmt: skip
    hf: Annotated[
        str | None,
        _engine("A model by name, as -m hf:…", "-hf", "-hfr", "--hf-repo"),
    ] = None
    n_ctx: Annotated[
        int | None,
        _engine(
            "KV cells in all, shared by the requests; 0: what the model was trained for. By default "
            "that as far as memory allows, and at least 4096.",
            "-c", "--n-ctx", "--ctx-size",
        ),
    ] = None  # fmt: skip
    n_seq_max: Annotated[
        int | None, _engine("Requests that run at once.", "--n-seq-max", "-np", "--parallel")
    ] = None
    max_queue: Annotated[
        int | None,
        _engine("Requests that may wait; then 429.", "--max-queue", default=_ENGINE.max_queue),
    ] = None
    threads: Annotated[
        int | None,
        _engine(
            "Compute threads at most; by default the physical cores, one for the embedded model.",
            "-t", "--threads", "--n-threads",
        ),
    ] = None  # fmt: skip
    threads_batch: Annotated[
        int | None,
        _engine("Compute threads for prompts; by default as many.", "-tb", "--threads-batch"),
    ] = None
    n_gpu_layers: Annotated[
        int | None,
        _engine(
            "Layers on the GPU; -1, the default: all that fit.",
            "-ngl", "--n-gpu-layers", "--gpu-layers",
        ),
    ] = None  # fmt: skip
    n_batch: Annotated[
        int | None,
        _engine("Rows of a tick.", "-b", "--n-batch", "--batch-size", default=_ENGINE.n_batch),
    ] = None
    n_ubatch: Annotated[
        int | None,
        _engine(
            "Rows of a physical batch.", "-ub", "--n-ubatch", "--ubatch-size",
            default=_ENGINE.n_ubatch,
        ),
    ] = None  # fmt: skip
    n_prefill_chunk: Annotated[
        int | None,
        _engine("Rows of a prompt in a tick that others wait for.", "--n-prefill-chunk"),
    ] = None
    target_itl_ms: Annotated[
        float | None,
        _engine(
            "Milliseconds between tokens that prompts leave to the streams.", "--target-itl-ms"
        ),
    ] = None
    prefix_cache: Annotated[
        bool | None,
        _engine(
            "Share prompts' common prefixes; on by default.", "--prefix-cache/--no-prefix-cache"
        ),
    ] = None
    prefix_cache_tokens: Annotated[
        int | None,
        _engine(
            "KV cells for the prefixes of finished requests; by default all that nobody needs.",
            "--prefix-cache-tokens",
        ),
    ] = None
    prefix_cache_bytes: Annotated[
        int | None,
        _engine(
            "Bytes of host memory for preempted requests and for prefixes that have left the KV cells; by "
            "default a quarter of what is free, 8 GiB at most.",
            "--prefix-cache-bytes",
        ),
    ] = None
    prefix_cache_dir: Annotated[
        str | None,
        _engine("Keep prefixes as files there too, for later.", "--prefix-cache-dir"),
    ] = None
    prefix_cache_dir_bytes: Annotated[
        int | None,
        _engine(
            "Bytes of all files there.", "--prefix-cache-dir-bytes",
            default=_ENGINE.prefix_cache_dir_bytes,
        ),
    ] = None  # fmt: skip
    kv_unified: Annotated[
        bool | None,
        _engine(
            "One KV buffer for all requests, or a share for each; by default shares if each is as long as the model was trained for.",
            "--kv-unified/--no-kv-unified",
            "-kvu/-no-kvu",
        ),
    ] = None
    deterministic: Annotated[
        bool | None,
        _engine(
            "The same tokens for the same request, to the bit, whatever runs beside it. CPU only.",
            "--deterministic/--no-deterministic",
        ),
    ] = None
    process: Annotated[
        bool | None,
        _engine(
            "Run llama.cpp in a process of its own, as `serve` does: if that crashes, all requests go on in a new one.",
            "--process/--no-process",
        ),
    ] = None
    hang_timeout_s: Annotated[
        float | None,
        _engine(
            "With --process: seconds without a sign of life after which it is started anew.",
            "--hang-timeout-s", default=_ENGINE.hang_timeout_s,
        ),
    ] = None  # fmt: skip
    tenant_weights: Annotated[
        list[str] | None,
        _engine(
            "NAME=WEIGHT: the share of a tenant's requests beside those of others, which have 1.  May be repeated.",
            "--tenant-weight", default=None,
        ),
    ] = None  # fmt: skip
    rpc: Annotated[
        list[str] | None,
        _engine(
            "Experimental: HOST:PORT of llama.cpp's RPC servers, which take layers; with --process. May be repeated.",
            "--rpc", default=None,
        ),
    ] = None  # fmt: skip
    speculation: Annotated[
        str | None,
        _engine(
            'Guess tokens, and compute the guesses with the token they follow: "ngram", or the '
            "file of a smaller model with the same vocabulary.",
            "--speculation", "-md", "--model-draft",
        ),
    ] = None  # fmt: skip
    flash_attn: Annotated[
        bool | None, _engine("By default llama.cpp decides.", "--flash-attn/--no-flash-attn")
    ] = None
    type_k: Annotated[
        str | None,
        _engine(
            "Data type of the keys.", "--type-k", "-ctk", "--cache-type-k", default=_ENGINE.type_k
        ),
    ] = None
    type_v: Annotated[
        str | None,
        _engine(
            "Data type of the values.", "--type-v", "-ctv", "--cache-type-v", default=_ENGINE.type_v
        ),
    ] = None
    use_mmap: Annotated[
        bool | None, _engine("Map the file; on by default.", "--mmap/--no-mmap")
    ] = None
    use_mlock: Annotated[
        bool | None, _engine("Lock the model in memory.", "--mlock/--no-mlock")
    ] = None
    overcommit: Annotated[
        bool | None,
        _engine(
            "Load what does not fit into memory, with a warning.", "--overcommit/--no-overcommit"
        ),
    ] = None
    check_tensors: Annotated[
        bool | None, _engine("Look for NaN in the weights.", "--check-tensors/--no-check-tensors")
    ] = None
    preflight: Annotated[
        bool | None,
        _engine(
            "Load the model in another process first; `serve --no-process` does so for files not seen before.",
            "--preflight/--no-preflight",
        ),
    ] = None
    lora: Annotated[
        list[str] | None,
        _engine(
            "A LoRA adapter, [NAME=]FILE[:SCALE]; with scale 0 for requests that name it. May be repeated.",
            "--lora",
            default=None,
        ),
    ] = None
    rope_scaling: Annotated[
        str | None, _engine("none, linear, yarn or longrope; the model's.", "--rope-scaling")
    ] = None
    rope_freq_base: Annotated[
        float | None, _engine("RoPE base frequency; the model's.", "--rope-freq-base")
    ] = None
    rope_freq_scale: Annotated[
        float | None, _engine("RoPE frequency scale; the model's.", "--rope-freq-scale")
    ] = None
    chat_template: Annotated[
        str | None,
        _engine("Jinja, or a file with it, in place of the model's own.", "--chat-template"),
    ] = None
    model_sampling: Annotated[
        bool,
        _engine(
            "Take what the model's file says of sampling.",
            "--model-sampling/--no-model-sampling",
            default=True,
        ),
    ] = True
    pooling: Annotated[
        str | None,
        _engine("Of texts that become vectors: mean, cls, last or rank; the model's.", "--pooling"),
    ] = None
    embedding_model: Annotated[
        str | None,
        _engine(
            "A model for texts beside the one that generates: a GGUF file, or hf:USER/REPO[:QUANT].",
            "--embedding-model",
        ),
    ] = None
    trace: Annotated[
        Path | None,
        _engine("Write ticks and requests to this file, for Perfetto.", "--trace"),
    ] = None

    def config(self, **defaults: Unpack[EngineOptions]) -> EngineConfig:
        """The settings: those given, then `defaults`, then the engine's own.

        Raises
        ------
        typer.BadParameter
            Says which value cannot be used, and the limit.
        """
        given = {k: value for k, value in _values(self).items() if value not in (None, [])}
        threads = given.pop("threads", None)
        options: dict[str, object] = {
            "n_ctx": "auto",
            **defaults,
            "n_threads": threads,
            "n_threads_batch": given.pop("threads_batch", threads),
            **given,
        }
        if self.lora:
            options["lora"] = tuple(map(_adapter, self.lora))
        if self.tenant_weights:
            options["tenant_weights"] = dict(map(_weight, self.tenant_weights))
        if self.rpc:  # llama.cpp's programs take them with commas between
            options["rpc"] = tuple(address for text in self.rpc for address in text.split(","))
        models = cast(list[str], options.pop("model", []))
        if len(models) > 1:
            raise typer.BadParameter(f"give one model, not {len(models)}", param_hint="-m")
        model = models[0] if models else None
        if (name := options.pop("hf", None)) is not None:
            if model is not None:
                raise typer.BadParameter("give -m or -hf, not both")
            model = PREFIX + str(name).removeprefix(PREFIX)
        options["model"] = model
        try:
            for field in ("model", "speculation", "embedding_model"):
                if is_name(given_name := options.get(field)):
                    options[field] = find_model(str(given_name))
            return EngineConfig(**cast(EngineOptions, options))
        except InvalidArgumentError as error:
            raise typer.BadParameter(str(error)) from None

    def configs(self, **defaults: Unpack[EngineOptions]) -> dict[str, EngineConfig]:
        """The settings of several models, by name; empty where there is one without a name.

        Raises
        ------
        typer.BadParameter
            As `config`; or some have names, and others not, or the same.
        """
        named = [NAMED.fullmatch(model) for model in self.model or ()]
        if not any(named) and len(named) < 2:
            return {}
        if self.trace is not None:
            raise typer.BadParameter("one file is for one model", param_hint="--trace")
        models: dict[str, EngineConfig] = {}
        for given, found in zip(self.model or (), named, strict=True):
            if found is None:
                raise typer.BadParameter(f"{given!r} has no name: NAME=MODEL", param_hint="-m")
            if found[1] in models:
                raise typer.BadParameter(f"two models are called {found[1]!r}", param_hint="-m")
            models[found[1]] = replace(self, model=[found[2]]).config(**defaults)
        return models


ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="MODEL", help="A GGUF file or hf:…; the embedded model."),
]


def model_file(given: str | None) -> Path | None:
    """The file of a model that is given by it, or by name; None: the embedded one.

    Raises
    ------
    typer.BadParameter
        It is neither.
    """
    try:
        if given is None:
            return None
        return find_model(given) if is_name(given) else Path(given)
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error)) from None


def _weight(text: str) -> tuple[str, float]:
    """Read NAME=WEIGHT."""
    name, separator, weight = text.rpartition("=")
    try:
        if not separator:
            raise ValueError(text)
        return name, float(weight)
    except ValueError:
        hint = "--tenant-weight"
        raise typer.BadParameter(f"{text!r} is not NAME=WEIGHT", param_hint=hint) from None


def _adapter(given: str) -> tuple[str, float] | tuple[str, str, float]:
    """[NAME=]FILE[:SCALE]."""
    named = NAMED.fullmatch(given)
    name, path = ("", given) if named is None else named.groups()
    file, _, last = path.rpartition(":")
    scale = 1.0
    if file:
        with contextlib.suppress(ValueError):
            path, scale = file, float(last)
    return (name, path, scale) if name else (path, scale)


def options_table() -> list[str]:
    """The options of `EngineFlags` as lines of a Markdown table."""
    rows = ["| option | |", "|---|---|"]
    for name, hint in get_type_hints(EngineFlags, include_extras=True).items():
        option = hint.__metadata__[0]
        # Typer takes the first name of an annotated option for its default.
        flags = ", ".join(f"`{flag}`" for flag in (option.default, *option.param_decls))
        field = "n_threads" if name == "threads" else name.replace("threads_b", "n_threads_b")
        rows.append(f"| {flags} | {option.help.replace(chr(92), '')} (`{field}`) |")
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags:
    """The options that become `SamplingParams`; None: not given."""

    files: ClassVar = ("json_schema", "grammar", "lark")

    max_tokens: Annotated[
        int | None,
        _sampling(
            "By default until the model ends or the context is full.",
            "-n",
            "--max-tokens",
            "--predict",
            "--n-predict",
        ),
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
    seed: Annotated[int | None, _sampling("By default a random one.", "-s", "--seed")] = None
    stop: Annotated[
        list[str] | None, _sampling("Text that ends the output; may be repeated.", "--stop")
    ] = None
    ignore_eos: Annotated[
        bool | None, _sampling("Never sample an end-of-generation token.", "--ignore-eos")
    ] = None
    json_schema: Annotated[
        str | None,
        _sampling("The output is JSON of this schema; text or @FILE.", "-j", "--json-schema"),
    ] = None
    regex: Annotated[str | None, _sampling("The whole output matches it.", "--regex")] = None
    grammar: Annotated[
        str | None, _sampling("The output follows this GBNF; text or @FILE.", "--grammar")
    ] = None
    lark: Annotated[
        str | None, _sampling("The output follows this Lark grammar; text or @FILE.", "--lark")
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
