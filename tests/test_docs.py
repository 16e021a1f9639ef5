"""The Python in the documentation runs as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def programs_with_tests() -> list[str]:
    """The programs of the page about testing that have tests, each with what continues it."""
    programs: list[str] = []
    for continues, block in BLOCK_OR_CONTINUED.findall((ROOT / "docs" / "testing.md").read_text()):
        programs.append(f"{programs.pop()}\n{block}" if continues else block)
    return [program for program in programs if "def test_" in program]


@pytest.mark.full
def test_the_tests_of_the_page_about_testing_pass(tmp_path: Path) -> None:
    for number, program in enumerate(programs_with_tests()):
        (tmp_path / f"test_program_{number}.py").write_text(program)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout
    # The test client of starlette may warn of the version of httpx.
    assert re.search(r"^17 passed(, \d+ warnings?)? in ", done.stdout, re.MULTILINE), done.stdout
