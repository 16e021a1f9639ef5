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
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *READMES]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(
        match[1], id=f"{page.name}:{page.read_text().count(chr(10), 0, match.start()) + 1}"
    )
    for page in PAGES
    for match in BLOCK.finditer(page.read_text())
    if page not in READMES or ".run(" in match[1]
]


@pytest.mark.parametrize("source", EXAMPLES)
def test_an_example_runs_as_it_is_written(source: str) -> None:
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_links_between_pages_lead_somewhere() -> None:
    for page in {*PAGES, *ROOT.glob("*.md")}:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
