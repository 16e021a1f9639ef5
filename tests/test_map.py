"""ARCHITECTURE.md says where things are: each file is there, and defines the name beside it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
ROWS = re.findall(r"^\| (.+?) \| `([\w/.]+)` \| `(\w+)` \|$", PAGE, re.MULTILINE)
TREE = re.search(r"^```\ncllm/\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def names_defined_in(path: Path) -> set[str]:
    """Classes, functions and other names at the top of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_the_map_has_at_least_twenty_everyday_changes() -> None:
    assert len(ROWS) >= 20
    assert len({what for what, _, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("what", "file", "name"), ROWS)
def test_what_is_to_be_opened_is_there_and_holds_the_name(what: str, file: str, name: str) -> None:
    assert name in names_defined_in(ROOT / file), f"{file} defines no {name}: {what}"


def test_the_tree_of_modules_has_every_module_of_the_engine() -> None:
    assert TREE is not None
    named = set(re.findall(r"(\w+)\.py\b", TREE[1]))
    modules = {p.stem for p in (ROOT / "cllm" / "engine").rglob("*.py")} - {"__init__"}
    assert modules <= named, modules - named
