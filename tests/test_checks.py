"""Callers use the value that a check returns, and not the argument, which may be a number of numpy."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cllm
from cllm.checks import check_timeout
from cllm.errors import InvalidRequestError

ROOT = Path(cllm.__file__).parent
CONVERTING = {
    "check_int",
    "check_float",
    "check_timeout",
    "check_limits",
    "token_ids_of",
    "check_lora",
}


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def dropped(source: str) -> list[int]:
    """Lines of checks of a parameter, or of a field of `self`, whose result is dropped."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
                continue
            call = node.value
            if not (isinstance(call.func, ast.Name) and call.func.id in CONVERTING):
                continue
            for value in call.args:
                is_own = isinstance(value, ast.Name) and value.id in parameters(function)
                is_field = isinstance(value, ast.Attribute) and ast.unparse(value.value) == "self"
                if is_own or (is_field and function.name == "__post_init__"):
                    found.add(node.lineno)
    return sorted(found)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.name)
def test_no_checked_argument_is_used_as_it_was_given(path: Path) -> None:
    assert not dropped(path.read_text())


def test_a_result_that_is_dropped_would_be_found() -> None:
    assert dropped("def f(n):\n    check_int('n', n, 0, 1)\n") == [2]
    assert dropped("def __post_init__(self):\n    check_int('n', self.n, 0, 1)\n") == [2]
    assert not dropped("def f(n):\n    n = check_int('n', n, 0, 1)\n")


def test_a_timeout_is_seconds_as_a_float() -> None:
    assert check_timeout(None, InvalidRequestError) is None
    assert repr(check_timeout(3, InvalidRequestError)) == "3.0"
    for wrong in (-1, True, "3", float("nan"), 10**400, [1]):
        with pytest.raises(InvalidRequestError, match="timeout"):
            check_timeout(wrong, InvalidRequestError)
