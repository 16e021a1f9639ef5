"""Habits of users of llama.cpp and Ollama: spellings that cllm takes, and hints for others."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from cllm.cli.texts import PREFIX

# Commands of Ollama and llama.cpp, and those that do the same here.
_COMMANDS = {
    "run": "cllm chat -m MODEL, or cllm generate -m MODEL PROMPT",
    "list": "cllm models",
    "ls": "cllm models",
    "rm": "cllm models --remove MODEL",
    "show": "cllm info MODEL",
    "ps": "ask a server for GET /api/ps, or GET /v1/models",
    "stop": "end cllm serve with Ctrl-C or SIGTERM: it finishes its requests first",
    "server": "cllm serve",
    "cli": "cllm chat",
    "completion": "cllm generate",
    "embedding": "cllm embed",
    "perplexity": "cllm doctor",
    "help": "cllm --help",
}
ON, OFF = ["--flash-attn"], ["--no-flash-attn"]
_FLASH_ATTENTION: dict[str, list[str]] = {
    "on": ON, "1": ON, "true": ON, "off": OFF, "0": OFF, "false": OFF, "auto": [],
}  # fmt: skip
_ADDRESS = re.compile(
    r"(?:https?://)?(?:huggingface|hf)\.co/(?P<repo>[\w.-]+/[\w.-]+)|https?://", re.ASCII
)
_OLLAMA_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", re.ASCII)


def hint_for_command(name: str) -> str:
    """Return the command that does what `name` does elsewhere; "" if none does."""
    return _COMMANDS.get(name, "")


def hint_for_model(name: str) -> str:
    """Return how to name a model that was named as elsewhere; "" for other names, and for files."""
    if address := _ADDRESS.match(name):
        repo = address["repo"] or "USER/REPO"
        return f"addresses are not read: give a GGUF file or hf:{repo}:QUANT"
    if not _OLLAMA_NAME.fullmatch(name) or not {":", "/"} & set(name):
        return ""
    if name.startswith(".") or name.endswith(".gguf"):
        return ""
    with suppress(OSError):  # the name is too long for a file
        if Path(name).exists():
            return ""
    if ":" not in name:
        return f"there is no such file: a repository of Hugging Face is hf:{name}:QUANT"
    return "names of Ollama are not known: give a GGUF file or hf:USER/REPO:QUANT"


def as_spelt_here(arguments: list[str], environment: MutableMapping[str, str]) -> list[str]:
    """Return the arguments of a command line with llama.cpp's `-fa on`, `off` and `auto` as cllm spells them.

    A switch on the command line is on or off.  `auto` is put into the environment, where it overrides a file.
    """
    spelt: list[str] = []

    def switch(value: str) -> list[str]:
        if value == "auto":
            environment[f"{PREFIX}FLASH_ATTN"] = value
        return _FLASH_ATTENTION[value]

    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            return [*spelt, argument, *rest]
        name, equals, value = argument.partition("=")
        if name not in ("-fa", "--flash-attn"):
            spelt.append(argument)
        elif equals:  # click rejects other values
            spelt += switch(value) if value in _FLASH_ATTENTION else [f"--flash-attn={value}"]
        elif (following := next(rest, None)) is None:
            spelt += ON
        elif following in _FLASH_ATTENTION:
            spelt += switch(following)
        else:  # -fa alone, before another argument
            return [*spelt, *ON, *as_spelt_here([following, *rest], environment)]
    return spelt
