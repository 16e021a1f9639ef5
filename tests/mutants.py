"""Does the fast suite find faults?  `python -m tests.mutants [--n 48] [--seed 0] [--full]`.

Each mutant is a copy of the project with one fault: a comparison or an operator replaced, a number off
by one, two arguments swapped, a call or an `await` removed.  The tests of its package run first, then
all of `make test`, and with `--full` the other tests of `make test-full`.  Each mutant is printed with
the stage whose tests failed, or SURVIVES.  Look at the survivors: some faults change nothing.  The exit
code is 1 if `make test` finds fewer than 90 % of the mutants.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("cllm/engine/core", "cllm/engine/sampling", "cllm/engine/loop", "cllm/bindings")
# Tests that are most likely to fail for a mutant of a package.
NEAR = {
    "cllm/engine/core": ("tests/engine/core", "tests/engine/test_stops.py", "tests/simulation"),
    "cllm/engine/sampling": ("tests/engine/sampling",),
    "cllm/engine/loop": ("tests/engine/loop", "tests/engine/test_engine.py"),
    "cllm/bindings": ("tests/bindings",),
}
ENGINE = (
    "tests/engine",
    "tests/simulation",
    "tests/testing",
    "tests/bindings",
)  # take half a minute; all of `make test` takes two
TURNED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*"}
# Code that makes texts for people is not mutated: no test has to fail for a changed text.
NOT_MUTATED = ("__repr__", "__str__")
SAID = {"debug", "info", "warning", "error", "exception", "log", "warn"}
TIMEOUT_S = 900
N_SAID = 4000  # characters of a report
WORKERS = ("-n", "auto", "--maxprocesses=8", "--dist", "loadfile")


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes
    ----------
    path : str
        Path from the root of the project.
    start, end : int
        First character of the replaced text in the file, and the one after its last.
    text : str
        Replacement.
    """

    path: str
    line: int
    start: int
    end: int
    text: str
    kind: str

    def __str__(self) -> str:
        source = (ROOT / self.path).read_text()
        was = " ".join(source[self.start : self.end].split())
        return f"{self.path}:{self.line} {self.kind}: {was[:70]!r} → {self.text[:70]!r}"


class Finder:
    """All faults that can be put into one file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path.relative_to(ROOT))
        self._source = path.read_text()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def mutants(self) -> Iterator[Mutant]:
        """Yield the mutants in the order of the file."""
        tree = ast.parse(self._source)
        for node in self._code(tree):
            yield from self._of(node)

    def _code(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that run, without log calls, texts, assertions, imports and annotations."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef) and child.name in NOT_MUTATED:
                continue
            if isinstance(child, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.Call) and getattr(child.func, "attr", "") in SAID:
                continue
            if isinstance(child, ast.AnnAssign | ast.arg) or child in _annotations(node):
                continue
            yield child
            yield from self._code(child)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            if len(node.ops) == 1:
                text = f"{left} {TURNED[type(node.ops[0])]} {right}"
                yield self._mutant(node, f"({text})", "comparison")
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            if not any(
                isinstance(side, ast.Constant | ast.JoinedStr)
                and isinstance(getattr(side, "value", None), str)
                for side in (node.left, node.right)
            ):
                operator = OPERATORS[type(node.op)]
                text = f"({ast.unparse(node.left)} {operator} {ast.unparse(node.right)})"
                yield self._mutant(node, text, "operator")
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            yield self._mutant(node, f"({word.join(map(ast.unparse, node.values))})", "and/or")
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield self._mutant(node, f"{node.value + 1}", "off by one")
        elif isinstance(node, ast.Await):
            yield self._mutant(node, f"({ast.unparse(node.value)})", "no await")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if getattr(node.value.func, "attr", "") not in SAID:
                yield self._mutant(node, "pass", "no call")
        elif isinstance(node, ast.Call) and _can_be_swapped(node):
            first, second, *rest = node.args
            call = ast.Call(node.func, [second, first, *rest], node.keywords)
            yield self._mutant(node, ast.unparse(call), "swapped arguments")

    def _mutant(self, node: ast.expr | ast.stmt, text: str, kind: str) -> Mutant:
        start, end = (
            self._place(node.lineno, node.col_offset),
            self._place(node.end_lineno or 0, node.end_col_offset or 0),
        )
        return Mutant(self._path, node.lineno, start, end, text, kind)

    def _place(self, line: int, column: int) -> int:
        text = self._source[self._starts[line - 1] : self._starts[line]]
        return self._starts[line - 1] + len(text.encode()[:column].decode())


def _can_be_swapped(call: ast.Call) -> bool:
    """Return True if swapping the first two arguments may change the result of a call."""
    is_symmetric = getattr(call.func, "id", "") in ("max", "min")
    is_starred = any(isinstance(argument, ast.Starred) for argument in call.args[:2])
    return len(call.args) >= 2 and not is_symmetric and not is_starred


def _annotations(node: ast.AST) -> list[ast.AST]:
    found = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    return [one for one in found if one is not None]


def chosen(n: int, seed: int) -> list[Mutant]:
    """Draw `n` mutants, in turn from each pair of a kind of fault and a package, until it has no more."""
    draw = random.Random(seed)
    pools: dict[tuple[str, str], list[Mutant]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).glob("*.py")):
            if path.name != "_llama_h.py":
                for mutant in Finder(path).mutants():
                    pools.setdefault((mutant.kind, package), []).append(mutant)
    found: list[Mutant] = []
    while len(found) < n and any(pools.values()):
        for key in sorted(pools):
            if pools[key] and len(found) < n:
                found.append(pools[key].pop(draw.randrange(len(pools[key]))))
    return found


def run_tests(tree: Path, *arguments: str, says_why: bool = False) -> bool:
    """Return True if these tests of a copy pass; with `says_why`, print the end of the report of a failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode and says_why:
        print(done.stdout.decode(errors="replace")[-N_SAID:])
    return done.returncode == 0


def killed_by(mutant: Mutant, tree: Path, *, with_full: bool) -> str:
    """Return the first stage whose tests fail for a mutant: "near", "fast", "full", or "" for none."""
    package = next(name for name in PACKAGES if mutant.path.startswith(name))
    path = tree / mutant.path
    source = path.read_text()
    path.write_text(source[: mutant.start] + mutant.text + source[mutant.end :])
    try:
        if not run_tests(tree, *WORKERS, *NEAR[package]):
            return "near"
        if not run_tests(tree, *WORKERS, *ENGINE):
            return "fast"
        if not run_tests(tree, *WORKERS):
            return "fast"
        if with_full and not run_tests(tree, *WORKERS, "-m", "full", "--timeout=300"):
            return "full"
    finally:
        path.write_text(source)
    return ""


def copy_of_the_project(directory: Path) -> Path:
    """Copy all files that git does not ignore, and the native library; return the root of the copy."""
    tree = directory / "cllm"
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in names:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    shutil.copytree(ROOT / "cllm" / "_native", tree / "cllm" / "_native", symlinks=True)
    return tree


def main() -> int:
    """Try the chosen mutants; 1 if `make test` finds fewer than 90 % of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="print the mutants, and run no test")
    parser.add_argument("--full", action="store_true", help="try survivors with test-full, too")
    options = parser.parse_args()
    mutants = chosen(options.n, options.seed)
    if options.list:
        print(*mutants, sep="\n")
        return 0
    by: dict[str, list[Mutant]] = {"near": [], "fast": [], "full": [], "": []}
    with tempfile.TemporaryDirectory() as directory:
        tree = copy_of_the_project(Path(directory))
        if not run_tests(tree, *WORKERS, *ENGINE, says_why=True):
            print("the tests fail without any fault")
            return 1
        for mutant in mutants:
            started = time.perf_counter()
            stage = killed_by(mutant, tree, with_full=options.full)
            by[stage].append(mutant)
            seconds = time.perf_counter() - started
            print(f"{stage or 'SURVIVES':8} {seconds:5.0f} s  {mutant}", flush=True)
    n_fast = len(by["near"]) + len(by["fast"])
    print(
        f"{len(mutants)} mutants: {n_fast} killed by make test, {len(by['full'])} more by", end=" "
    )
    print(f"make test-full, {len(by[''])} by none")
    return int(n_fast < 0.9 * len(mutants))


if __name__ == "__main__":
    sys.exit(main())
