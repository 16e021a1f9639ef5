"""What holds of the kit as a whole: its names, and that a promise that is broken is said."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

import cllm.testing
from cllm.testing import FakeDecoder
from cllm.testing.load import burst, cancel_storm, oracle, poisson, sequential, slow_readers
from tests.simulation.conformance import check_decoder

MODULES = sorted(Path(cllm.testing.__file__).parent.glob("*.py"))


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    names = cllm.testing.__all__
    assert len(names) == len(set(names))
    values = {name: getattr(cllm.testing, name) for name in names}
    for name, value in values.items():
        if inspect.isclass(value) or inspect.isfunction(value):  # and no alias of a type
            assert inspect.getdoc(value), name


@pytest.mark.parametrize(
    "load",
    [sequential, burst, poisson, cancel_storm, slow_readers, oracle],
    ids=lambda f: f.__name__,
)
def test_the_help_of_a_load_says_all_of_its_arguments_and_errors(load: Any) -> None:
    documented = inspect.getdoc(load) or ""
    for name in set(inspect.signature(load).parameters) - {"engine"}:
        assert name in documented.split("Returns\n")[0], name
    refers = load is not sequential and "As for `sequential`" in documented
    for section in ("Parameters\n-", *(() if refers else ("Returns\n-", "Raises\n-"))):
        assert section in documented


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_what_the_kit_finds_is_found_without_assertions_too(path: Path) -> None:
    """`python -O` leaves out `assert`; and nobody rewrites those of this package for a message."""
    lines = [n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Assert)]
    assert lines == []


class _Crashing(FakeDecoder):
    def seq_cp(self, *_arguments: Any, **_options: Any) -> None:
        raise IndexError("list index out of range")


def test_a_decoder_that_raises_what_it_likes_breaks_the_promise_that_is_named() -> None:
    with pytest.raises(AssertionError, match=r"layout\): IndexError\('list index") as caught:
        check_decoder(_Crashing)
    assert isinstance(caught.value.__cause__, IndexError)
