"""Imports go one way, one file is one room, and the core needs anyio and numpy alone."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

import cllm

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cllm"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "_native" not in p.parts)
OTHERS = sorted(p for room in ("tests", "tools", "benchmarks") for p in (ROOT / room).rglob("*.py"))
MAX_LINES = 400

# Who may import what of cllm: the first rule whose room holds the module decides.
PURE = ("cllm.engine", "cllm.errors", "cllm.checks")
RULES: list[tuple[str, tuple[str, ...]]] = [
    ("cllm.errors", ("cllm.engine.request",)),  # for type checkers only
    ("cllm.checks", ("cllm.errors",)),
    ("cllm.bindings", ("cllm.bindings", "cllm.checks", "cllm.errors")),
    ("cllm.engine.llama_backend", ("cllm.bindings", *PURE)),
    ("cllm.engine.llama_decoder", ("cllm.bindings", *PURE)),
    ("cllm.engine.llama_sampler", ("cllm.bindings", *PURE)),
    ("cllm.engine.lifecycle", ("cllm.bindings", *PURE)),
    ("cllm.engine.constraint_trial", ("cllm.bindings", *PURE)),
    ("cllm.engine.constraint_helper", ("cllm.bindings", *PURE)),
    ("cllm.engine.preflight", ("cllm.bindings", *PURE)),
    ("cllm.engine", PURE),
    ("cllm.testing", ("cllm", "cllm.testing", *PURE)),
    ("cllm.server.fields", ("cllm", "cllm.server", "cllm.engine.sampling_params")),
    ("cllm.server", ("cllm", "cllm.server", "cllm.errors")),
    ("cllm.doctor.preflight", ("cllm", "cllm.doctor", "cllm.engine.preflight")),
    ("cllm.doctor", ("cllm.doctor", "cllm.bindings", "cllm.checks", "cllm.errors")),
    ("cllm.cli.doctor", ("cllm", "cllm.cli", "cllm.doctor")),
    ("cllm.cli.serve", ("cllm", "cllm.cli", "cllm.server")),
    ("cllm.cli", ("cllm", "cllm.cli")),
    ("cllm.__main__", ("cllm.cli.app",)),
    ("cllm", PURE),
]
# What the extra `server` brings.
SERVER = {
    "fastapi",
    "fastapi_offline",
    "h11",
    "prometheus_client",
    "pydantic",
    "pydantic_core",
    "starlette",
    "uvicorn",
}
# Those that import the extra `chat`, when they are first used.
CHAT = {"cllm.engine.template_sandbox", "cllm.engine.template_meter"}
# Modules that run without an event loop and without libllama.
WITHOUT_ANYIO = {
    "cllm.engine." + name
    for name in [
        "backend",
        "chat",
        "chat_template",
        "config",
        "constraint",
        "control_names",
        "decoder",
        "detokenizer",
        "gbnf",
        "gbnf_rules",
        "guidance",
        "health",
        "helper_process",
        "inference_thread",
        "kv_cache",
        "kv_cache_manager",
        "llama_decoder",
        "llama_sampler",
        "logprobs",
        "output_processor",
        "prefix_cache",
        "preflight",
        "recovery",
        "request",
        "row_scan",
        "run_queue",
        "sampling",
        "sampling_params",
        "scheduler",
        "seen_models",
        "sequence",
        "slots",
        "statistics",
        "submission",
        "template_meter",
        "template_sandbox",
        "tick",
        "tick_cost",
        "tick_log",
    ]
}


def name_of(path: Path) -> str:
    """Dotted name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Dotted names of everything a module imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            assert node.module is not None
            found.add(node.module)
    return found


def is_inside(name: str, room: str) -> bool:
    """Whether a module is a room, or in it."""
    return name == room or name.startswith(room + ".")


def may_import(module: str, imported: str) -> bool:
    """Whether the first rule for `module` has a place for `imported`."""
    allowed = next(rooms for room, rooms in RULES if is_inside(module, room))
    return any(
        imported == room if room == "cllm" else is_inside(imported, room) for room in allowed
    )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    module = name_of(path)
    for imported in imports_of(path):
        if is_inside(imported, "cllm"):
            assert may_import(module, imported), f"{module} must not import {imported}"


def test_the_rules_forbid_what_they_should() -> None:
    assert not may_import("cllm.bindings.model", "cllm.engine.request")
    assert not may_import("cllm.engine.scheduler", "cllm.bindings")
    assert not may_import("cllm.cli.demo", "cllm.engine.engine")
    assert not may_import("cllm.testing.fake_decoder", "cllm.bindings")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_import_the_libraries_their_room_may(path: Path) -> None:
    module, roots = name_of(path), {name.split(".")[0] for name in imports_of(path)}
    third_party = roots - set(sys.stdlib_module_names) - {"cllm", "__future__"}
    allowed = {"numpy", "anyio"}
    if is_inside(module, "cllm.cli"):
        allowed |= {"typer", "rich"}
    if is_inside(module, "cllm.server"):
        allowed |= SERVER
    if module in ("cllm.doctor.plot", "cllm.cli.bench_report"):
        allowed |= {"matplotlib"}
    if module == "cllm.server.tracing":
        allowed |= {"opentelemetry"}
    if module in CHAT:
        allowed |= {"jinja2", "markupsafe"}
    if is_inside(module, "cllm.bindings") or module in WITHOUT_ANYIO:
        allowed -= {"anyio"}
    assert third_party <= allowed, f"{module} imports {third_party - allowed}"
    if is_inside(module, "cllm.bindings"):
        assert not roots & {"asyncio", "concurrent", "queue"}


def test_the_core_depends_on_anyio_and_numpy_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.split(">")[0] for requirement in project["dependencies"]}
    assert names == {"anyio", "numpy"}
    extras = project["optional-dependencies"].values()
    for requirement in [*project["dependencies"], *(r for extra in extras for r in extra)]:
        assert requirement.startswith("cllm[") or (">=" in requirement and "<" in requirement)


@pytest.mark.parametrize("path", [*MODULES, *OTHERS], ids=name_of)
def test_no_file_is_too_long_for_one_reading(path: Path) -> None:
    if path.name != "_llama_h.py":
        assert len(path.read_text().splitlines()) <= MAX_LINES


def test_no_source_file_holds_what_the_house_forbids() -> None:
    for path in MODULES:
        text = path.read_text()
        for word in ("TODO", "FIXME", "XXX", "pickle", "eval(", "def __del__", "import *"):
            assert word not in text, f"{word} in {path}"


def test_the_version_and_the_packages_are_those_of_the_project() -> None:
    """A wheel without one of the packages works in the checkout, and nowhere else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert cllm.__version__ == project["project"]["version"]
    packages = {name_of(path) for path in (ROOT / "cllm").rglob("__init__.py")}
    assert set(project["tool"]["setuptools"]["packages"]) == packages
