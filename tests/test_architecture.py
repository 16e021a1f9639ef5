"""Imports go one way, proved by every path; and the core needs anyio and numpy alone."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import cllm

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cllm"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "_native" not in p.parts)

# The order of `cllm.engine`: a module imports from earlier lines, and from its own package.
VALUES = (
    "checks errors hub log_once memory processors removed sampling_limits settings shared_libraries system engine.audio engine.cache_directory engine.child_process engine.completion_builder engine.config engine.constraint engine.embedding engine.file_content engine.health engine.image engine.media_child engine.media_limits engine.media_parts engine.json_schema engine.lora engine.media engine.media_rows engine.media_source engine.device_settings engine.output engine.patterns engine.plain_values engine.request engine.rpc_address engine.schema_limits"
    " engine.sampling_params engine.state_file engine.vocabulary"
)
LAYERS = [
    [f"cllm.{name}" for name in layer.split()]
    for layer in (
        VALUES,
        "engine.chat engine.sampling",
        "engine.core",
        "engine.thread",
        "engine.loop engine.constraints",
        "engine.llama",
        "engine.process",
        "engine.parts",
        "engine.lifecycle",
        "engine.embedder",
        "engine.engine",
        "engine.preflight_child",
    )
]
# What runs without an event loop and without libllama.
PURE = ("cllm.engine.chat", "cllm.engine.core", "cllm.engine.sampling")
IMPURE = {"anyio", "ctypes", "asyncio", "trio"}
# But for chat, which asks a process of its own: one thread at a time, and any may close it.
WITHOUT_THREADS = ("cllm.engine.core", "cllm.engine.sampling")
THREADS = {"threading", "subprocess", "concurrent"}
# The packages around the engine, and the names that they may import of cllm: the first that fits.
RULES: list[tuple[str, tuple[str, ...]]] = [
    (
        "cllm.bindings",
        (
            "cllm.bindings",
            "cllm.checks",
            "cllm.errors",
            "cllm.log_once",
            "cllm.memory",
            "cllm.sampling_limits",
            "cllm.shared_libraries",
            "cllm.system",
        ),
    ),
    ("cllm.settings", ("cllm.checks", "cllm.errors")),
    (
        "cllm.testing.fake_server",
        ("cllm", "cllm.testing", "cllm.engine", "cllm.errors", "cllm.server"),
    ),
    (
        "cllm.testing",
        ("cllm", "cllm.testing", "cllm.engine", "cllm.errors", "cllm.checks", "cllm.removed"),
    ),
    (
        "cllm.server.bodies.fields",
        (
            "cllm",
            "cllm.server",
            "cllm.engine.media_limits",
            "cllm.engine.media_parts",
            "cllm.engine.media_source",
            "cllm.engine.sampling_params",
            "cllm.sampling_limits",
        ),
    ),
    ("cllm.server.answers.infill", ("cllm", "cllm.checks")),
    ("cllm.server.bodies.schemas", ("cllm", "cllm.checks", "cllm.server")),
    ("cllm.server.http.api_keys", ("cllm", "cllm.checks", "cllm.server", "cllm.settings")),
    ("cllm.server.operation.pulls", ("cllm", "cllm.hub", "cllm.server")),
    ("cllm.server.http.fetching", ("cllm", "cllm.server", "cllm.engine.media_parts")),
    ("cllm.server.routes.llama_server", ("cllm", "cllm.checks", "cllm.server")),
    (
        "cllm.server.routes.messages",
        ("cllm", "cllm.server", "cllm.engine.chat.readable", "cllm.engine.media_parts"),
    ),
    (
        "cllm.server.config",
        ("cllm.checks", "cllm.sampling_limits", "cllm.settings"),
    ),
    ("cllm.server.serving", ("cllm", "cllm.server", "cllm.shared_libraries", "cllm.system")),
    ("cllm.server", ("cllm", "cllm.server", "cllm.errors", "cllm.log_once", "cllm.removed")),
    (
        "cllm.doctor.model_facts",
        (
            "cllm.doctor",
            "cllm.bindings",
            "cllm.memory",
            "cllm.engine.config",
            "cllm.engine.llama.memory",
            "cllm.engine.llama.gguf_header",
            "cllm.engine.llama.mtp_drafter",
            "cllm.engine.llama.preflight",
        ),
    ),
    (
        "cllm.doctor.processors",
        (
            "cllm.doctor",
            "cllm.engine.core.thread_tuner",
            "cllm.engine.thread.processor_load",
            "cllm.processors",
        ),
    ),
    ("cllm.doctor.engine_check", ("cllm", "cllm.doctor")),
    ("cllm.doctor.preflight", ("cllm", "cllm.doctor", "cllm.engine.llama.preflight")),
    (
        "cllm.doctor.last_crash",
        ("cllm.doctor", "cllm.engine.process.crash_report"),
    ),
    (
        "cllm.doctor.template_check",
        ("cllm.doctor", "cllm.bindings", "cllm.errors", "cllm.engine.chat"),
    ),
    (
        "cllm.doctor.installation",
        (
            "cllm.doctor",
            "cllm.bindings",
            "cllm.errors",
            "cllm.memory",
            "cllm.processors",
            "cllm.system",
        ),
    ),
    ("cllm.doctor", ("cllm.doctor", "cllm.bindings", "cllm.checks", "cllm.errors", "cllm.memory")),
    ("cllm.cli.bench_report", ("cllm", "cllm.cli", "cllm.processors")),
    ("cllm.cli.app", ("cllm", "cllm.checks", "cllm.cli", "cllm.doctor", "cllm.removed")),
    ("cllm.cli.option_sources", ("cllm", "cllm.checks", "cllm.cli", "cllm.removed")),
    ("cllm.cli.doctor", ("cllm", "cllm.cli", "cllm.doctor")),
    ("cllm.cli.info", ("cllm", "cllm.cli", "cllm.doctor")),
    ("cllm.cli.tokenize", ("cllm", "cllm.cli", "cllm.doctor")),
    (
        "cllm.cli.options",
        (
            "cllm",
            "cllm.cli",
            "cllm.engine.config",
            "cllm.errors",
            "cllm.hub",
            "cllm.server.config",
            "cllm.settings",
        ),
    ),
    ("cllm.cli.pull", ("cllm", "cllm.cli", "cllm.hub")),
    (
        "cllm.cli.chat_commands",
        ("cllm", "cllm.checks", "cllm.cli", "cllm.hub", "cllm.settings"),
    ),
    ("cllm.cli.chat_files", ("cllm", "cllm.cli", "cllm.engine.cache_directory")),
    ("cllm.cli.chat_prompt", ("cllm.cli", "cllm.engine.cache_directory")),
    ("cllm.cli.embed", ("cllm", "cllm.cli", "cllm.engine.cache_directory")),
    (
        "cllm.cli.tune",
        (
            "cllm",
            "cllm.cli",
            "cllm.doctor",
            "cllm.engine.core.tick_shares",
            "cllm.engine.llama.tuner",
            "cllm.engine.llama.tuning",
            "cllm.system",
        ),
    ),
    # The interpreter of the engine's process begins before the server is imported.
    (
        "cllm.cli.serve",
        (
            "cllm",
            "cllm.cli",
            "cllm.errors",
            "cllm.server",
            "cllm.system",
            "cllm.testing",
            "cllm.engine.process.spawn",
        ),
    ),
    ("cllm.cli", ("cllm", "cllm.cli")),
    ("cllm.__main__", ("cllm.cli.app",)),
    (
        "cllm.integrations.llm_plugin",
        (
            "cllm",
            "cllm.engine.loop.loop_thread",
            "cllm.engine.media_limits",
            "cllm.integrations",
            "cllm.hub",
        ),
    ),
    (
        "cllm.integrations",
        ("cllm", "cllm.engine.loop.loop_thread", "cllm.errors", "cllm.integrations"),
    ),
    (
        "cllm.client",
        ("cllm.checks", "cllm.client", "cllm.engine", "cllm.errors", "cllm.routing"),
    ),
    ("cllm.routing", ("cllm.checks", "cllm.errors", "cllm.routing")),
    ("cllm.ray", ("cllm", "cllm.checks", "cllm.errors", "cllm.ray", "cllm.routing", "cllm.server")),
    ("cllm", ("cllm.engine", "cllm.errors")),
]
# The libraries of each package beyond numpy; of the engine, who has to do with an event loop.
LIBRARIES: list[tuple[str, str]] = [
    ("cllm.bindings", ""),
    ("cllm.engine.chat.template_child", "jinja2"),
    ("cllm.engine.constraints.trial", "anyio"),
    ("cllm.engine.engine", "anyio"),
    ("cllm.engine.lifecycle", "anyio"),
    ("cllm.engine.loop", "anyio"),
    ("cllm.engine.parts", "anyio"),
    ("cllm.engine.preflight_child", "anyio"),
    ("cllm.engine.thread.mailbox", "anyio"),
    ("cllm.engine.thread.socket_watch", "anyio trio"),
    ("cllm.engine.thread.worker_thread", "anyio"),
    ("cllm.engine.media_child", "PIL soundfile soxr"),
    ("cllm.engine.process.batch_record", "msgspec"),
    ("cllm.engine.process.wire", "msgspec"),
    ("cllm.engine", ""),
    ("cllm.cli.bench_report", "anyio matplotlib rich typer"),
    ("cllm.cli.demo_pictures", "numpy rich"),
    ("cllm.cli.chat_output", "anyio markdown_it rich"),
    ("cllm.cli.chat_prompt", "anyio prompt_toolkit"),
    ("cllm.cli.chat", "anyio prompt_toolkit rich typer"),
    ("cllm.cli", "anyio rich typer"),
    ("cllm.client", "anyio httpx"),
    ("cllm.hub", "filelock huggingface_hub"),
    ("cllm.routing", ""),
    ("cllm.ray", "anyio fastapi ray"),
    ("cllm.integrations.langchain", "langchain_core pydantic"),
    ("cllm.integrations.llama_index", "llama_index"),
    ("cllm.integrations.llm_plugin", "anyio llm pydantic"),
    ("cllm.integrations.pydantic_ai", "pydantic_ai"),
    ("cllm.doctor.plot", "matplotlib"),
    ("cllm.server.engine_task", "anyio starlette trio"),
    ("cllm.testing.fake_rules", "yaml"),
    ("cllm.testing.fake_server", "anyio fastapi starlette"),
    ("cllm.server.http.public_network", "anyio httpcore"),
    ("cllm.server.operation.tracing", "anyio fastapi opentelemetry starlette"),
    (
        "cllm.server",
        "anyio fastapi fastapi_offline httptools orjson prometheus_client pydantic pydantic_core python_multipart starlette"
        " uvicorn",
    ),
    ("cllm", "anyio"),
]


def name_of(path: Path) -> str:
    """Dotted name of a module."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {name_of(path): path for path in MODULES}


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node, without what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from runtime_nodes(child)


@cache
def imports_of(module: str, *, for_types: bool = False) -> frozenset[str]:
    """Dotted names of everything a module imports, inside its functions too."""
    found: set[str] = set()
    nodes = ast.walk if for_types else runtime_nodes
    for node in nodes(ast.parse(PATHS[module].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {module}"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in PATHS else node.module)
    return frozenset(found)


def graph(*, for_types: bool = False) -> dict[str, frozenset[str]]:
    """Which modules of cllm each of them imports; `for_types`: for type checkers alone, too.

    The package itself names everything for them.
    """
    return {
        name: imports_of(name, for_types=for_types and name != "cllm") & PATHS.keys()
        for name in PATHS
    }


def reached_from(module: str, edges: Mapping[str, frozenset[str]]) -> dict[str, list[str]]:
    """Every module that an import of `module` leads to, with the way there."""
    ways = {module: [module]}
    todo = [module]
    while todo:
        here = todo.pop()
        for there in edges.get(here, ()):
            if there not in ways:
                ways[there] = [*ways[here], there]
                todo.append(there)
    return ways


def circle_in(edges: Mapping[str, frozenset[str]]) -> list[str] | None:
    """Modules that import each other in turn, if there are any."""
    for module in edges:
        for other in edges[module]:
            ways = reached_from(other, edges)
            if module in ways:
                return [module, *ways[module]]
    return None


def is_inside(name: str, package: str) -> bool:
    """Whether a module is a package, or in it."""
    return name == package or name.startswith(package + ".")


def layer_of(module: str) -> tuple[int, str]:
    """The number of a module's layer, and its part of that layer."""
    for number, parts in enumerate(LAYERS):
        for part in parts:
            if is_inside(module, part):
                return number, part
    raise AssertionError(f"{module} is in no layer")


def may_import(module: str, imported: str) -> bool:
    """Whether the order of the engine, or the first rule for `module`, allows an import."""
    if any(is_inside(module, part) for part in ("cllm.engine", *LAYERS[0])):
        if is_inside(imported, "cllm.bindings"):
            return is_inside(module, "cllm.engine.llama") or module == "cllm.engine.lifecycle"
        if module == "cllm.engine":
            return False
        (own, part), (other, other_part) = layer_of(module), layer_of(imported)
        return other < own or (other == own and (part == other_part or own == 0))
    allowed = next(packages for package, packages in RULES if is_inside(module, package))
    return any(
        imported == name if name == "cllm" else is_inside(imported, name) for name in allowed
    )


@pytest.mark.parametrize("module", sorted(PATHS))
def test_imports_go_one_way(module: str) -> None:
    for imported in imports_of(module):
        if is_inside(imported, "cllm"):
            assert may_import(module, imported), f"{module} must not import {imported}"


def test_the_rules_forbid_what_they_should() -> None:
    assert not may_import("cllm.bindings.model", "cllm.engine.request")
    assert not may_import("cllm.engine.core.scheduler", "cllm.bindings")
    assert not may_import("cllm.engine.core.scheduler", "cllm.engine.thread.mailbox")
    assert not may_import("cllm.engine.sampling.logprobs", "cllm.engine.chat.chat_prompt")
    assert not may_import("cllm.engine.request", "cllm.engine.core.sequence")
    assert not may_import("cllm.engine.loop.stream", "cllm.engine.constraints.trial")
    assert not may_import("cllm.cli.demo", "cllm.engine.engine")
    assert not may_import("cllm.testing.fake_decoder", "cllm.bindings")
    assert may_import("cllm.engine.llama.backend", "cllm.engine.constraints.compiler")


def test_no_module_imports_itself_by_any_way_round() -> None:
    assert circle_in(graph()) is None


def test_imports_for_type_checkers_make_no_circle_either() -> None:
    assert circle_in(graph(for_types=True)) is None


def test_a_circle_would_be_found() -> None:
    edges = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"b"})}
    assert circle_in(edges) is not None
    assert circle_in({"a": frozenset({"b"}), "b": frozenset()}) is None


@pytest.mark.parametrize("module", [m for m in sorted(PATHS) if m.startswith(PURE)])
def test_the_core_is_pure_by_every_path(module: str) -> None:
    """No event loop and no libllama, however many imports away; in core and sampling, no thread."""
    edges = {name: imports_of(name) for name in PATHS}
    impure = IMPURE | THREADS if module.startswith(WITHOUT_THREADS) else IMPURE
    for reached, way in reached_from(module, edges).items():
        is_impure = reached.split(".")[0] in impure or is_inside(reached, "cllm.bindings")
        assert not is_impure, " → ".join(way)


def test_the_core_runs_where_there_is_nothing_else() -> None:
    """What the syntax trees say is so: an import of anyio or of the bindings would fail here."""
    pure = [module for module in sorted(PATHS) if module.startswith(PURE)]
    program = f"""
import importlib, sys, types
for name, path in {{"cllm": {str(PACKAGE)!r}, "cllm.engine": {str(PACKAGE / "engine")!r}}}.items():
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [path]
for name in ("anyio", "asyncio", "trio", "cllm.bindings"):
    sys.modules[name] = None
for name in {pure!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_the_package_of_llama_cpp_opens_models_and_contexts() -> None:
    """Of the engine.  `cllm.doctor` looks at the bindings alone, and that is what it is for."""
    for module, path in PATHS.items():
        if is_inside(module, "cllm.engine") and not is_inside(module, "cllm.engine.llama"):
            text = path.read_text()
            assert not re.search(r"\b(Model|Context|LoraAdapter|Batch)\(", text), module


@pytest.mark.parametrize("module", sorted(PATHS))
def test_modules_import_the_libraries_their_package_may(module: str) -> None:
    roots = {name.split(".")[0] for name in imports_of(module)}
    third_party = roots - set(sys.stdlib_module_names) - {"cllm", "__future__"}
    allowed = next(names for package, names in LIBRARIES if is_inside(module, package))
    assert third_party <= {"numpy", *allowed.split()}, f"{module} imports {third_party}"
    if is_inside(module, "cllm.bindings"):
        assert not roots & {"asyncio", "concurrent", "queue"}


def test_the_core_depends_on_anyio_and_numpy_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.split(">")[0] for requirement in project["dependencies"]}
    assert names == {"anyio", "numpy"}
    extras = project["optional-dependencies"].values()
    for requirement in [*project["dependencies"], *(r for extra in extras for r in extra)]:
        is_pinned = "==" in requirement  # a client, or what is not stable yet
        is_bounded = ">=" in requirement and "<" in requirement
        assert requirement.startswith("cllm[") or is_pinned or is_bounded


# For people, for other programs, and for times of files.
CLOCK_OF_THE_DAY = {
    "cllm.cli.chat_files", "cllm.server.routes.ollama",
    "cllm.engine.chat.chat_template", "cllm.engine.chat.chat_tokenizer",
    "cllm.engine.file_content", "cllm.engine.process.crash_report",
    "cllm.engine.thread.prefix_files", "cllm.integrations.pydantic_ai", "cllm.server.answers.formats",
    "cllm.server.routes.responses", "cllm.server.answers.running", "cllm.server.several", "cllm.server.state",
}  # fmt: skip


def test_few_modules_read_the_clock_of_the_day() -> None:
    reads = re.compile(r"\btime\.time(_ns)?\b|from time import|datetime\.(now|utcnow|today)\(")
    found = {module for module, path in PATHS.items() if reads.search(path.read_text())}
    assert found == CLOCK_OF_THE_DAY


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


def test_the_tests_of_the_engine_mirror_its_packages() -> None:
    """A test of a part of the engine is in the folder of that part."""
    packages = {p.parent.name for p in (PACKAGE / "engine").glob("*/__init__.py")}
    folders = {p.parent.name for p in (ROOT / "tests" / "engine").glob("*/__init__.py")}
    assert folders == packages


def test_every_public_name_is_the_one_of_its_module() -> None:
    assert cllm._MODULE_OF.keys() == set(cllm.__all__) <= set(dir(cllm))
    for name, module in cllm._MODULE_OF.items():
        assert getattr(cllm, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="nothing_of_it"):
        cllm.nothing_of_it  # noqa: B018


@pytest.mark.parametrize(
    ("statement", "is_not_needed"),
    [
        ("import cllm; cllm.errors.CllmError; cllm.EngineConfig", {"numpy", "anyio", "cllm.bindings"}),
        ("import cllm.engine.process.child", {"asyncio", "cllm.engine.lifecycle"}),
        (
            "from cllm.cli.app import command_line; command_line('serve')",
            {"numpy", "asyncio", "fastapi", "cllm.bindings", "cllm.cli.chat"},
        ),
    ],
)  # fmt: skip
def test_a_program_imports_no_more_than_it_needs(statement: str, is_not_needed: set[str]) -> None:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert not is_not_needed & set(done.stdout.split())
