"""The Python in the documentation runs as it is written."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import typer
import yaml

from cllm.cli.app import command_line
from tools.docs import reference

ROOT = Path(__file__).parents[1]
# Of the READMEs, what is a whole program; the rest is there to be read.
READMES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *READMES]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK_OR_CONTINUED = re.compile(r"^```python( continued)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(
        match[1], id=f"{page.name}:{page.read_text().count(chr(10), 0, match.start()) + 1}"
    )
    for page in PAGES
    for match in BLOCK.finditer(page.read_text())
    if page not in READMES or ".run(" in match[1]
]


@pytest.mark.full
@pytest.mark.parametrize("source", EXAMPLES)
def test_an_example_runs_as_it_is_written(source: str) -> None:
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_links_between_pages_lead_somewhere() -> None:
    for page in {*PAGES, *ROOT.glob("*.md")}:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
GENERATED = {"architectures.md", "reliability.md", "options.md"}


def pages_of(navigation: object) -> set[str]:
    """The pages of a navigation, in all its levels."""
    if isinstance(navigation, str):
        return {navigation}
    inner = navigation.values() if isinstance(navigation, dict) else navigation
    return set().union(*map(pages_of, cast(Iterable[object], inner)))


def test_the_site_has_every_page() -> None:
    found = pages_of(SITE["nav"])
    assert {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")} <= found
    assert all((ROOT / page).exists() for page in found if not page.startswith("reference/"))
    assert set(reference()) == {Path(page).stem for page in found if page.startswith("reference/")}


def test_pages_are_short() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.name in GENERATED or len(page.read_text().split()) <= 1500, page.name
    assert len((ROOT / "README.md").read_text().split()) <= 900
    assert len((ROOT / "ARCHITECTURE.md").read_bytes()) <= 20_000


def commands() -> list[tuple[str, str]]:
    """The lines of shell blocks that call `cllm`, with their pages."""
    blocks = (
        (page, re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S)) for page in PAGES
    )
    return [
        (page.name, line)
        for page, found in blocks
        for block in found
        for line in block.replace("\\\n", " ").splitlines()
        if re.match(r"(CLLM_\w+=\S+ )*cllm [a-z]", line)
    ]


def test_commands_on_pages_have_the_options_that_they_use() -> None:
    group: Any = typer.main.get_command(command_line())
    assert len(commands()) >= 15
    for page, line in commands():
        words = shlex.split(line, comments=True)
        name = words[words.index("cllm") + 1]
        assert name in group.commands, (page, line)
        options = {o for p in group.commands[name].params for o in (*p.opts, *p.secondary_opts)}
        used = {word.split("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert used <= {*options, "--help"}, (page, line, used - options)


PAGES_WITH_TESTS = ("testing.md", "testing-reference.md", "vision.md", "frameworks.md")


def programs_with_tests() -> list[str]:
    """The programs of the pages that have tests, each with what continues it."""
    programs: list[str] = []
    pages = [(ROOT / "docs" / name).read_text() for name in PAGES_WITH_TESTS]
    for continues, block in BLOCK_OR_CONTINUED.findall("\n".join(pages)):
        programs.append(f"{programs.pop()}\n{block}" if continues else block)
    return [program for program in programs if "def test_" in program]


@pytest.mark.full
def test_the_tests_of_the_page_about_testing_pass(tmp_path: Path) -> None:
    for number, program in enumerate(programs_with_tests()):
        (tmp_path / f"test_program_{number}.py").write_text(program)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout
    # The test client of starlette may warn of the version of httpx.
    assert re.search(r"^22 passed(, \d+ warnings?)? in ", done.stdout, re.MULTILINE), done.stdout
