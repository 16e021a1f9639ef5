"""The picture, and the doctor without matplotlib."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cllm.doctor import Conclusion, Report, has_matplotlib, save_plot
from tests.conftest import some_in_fast
from tests.doctor import synthetic


@pytest.mark.skipif(not has_matplotlib(), reason="needs the extra plot")
@pytest.mark.parametrize(
    ("name", "magic"),
    some_in_fast([("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")]),
)
def test_a_picture_is_written_in_the_format_of_its_name(
    name: str, magic: bytes, tmp_path: Path
) -> None:
    report = synthetic.report(*map(synthetic.experiment, synthetic.PATTERNS))
    report = Report((*report.findings, Conclusion(False, "No. " * 40)))
    save_plot(report, tmp_path / name, title="synthetic")
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_the_doctor_does_not_import_matplotlib_until_a_picture_is_wanted() -> None:
    done = subprocess.run(
        [sys.executable, "-c",
         "import sys, cllm.doctor; sys.exit(any(m.startswith('matplotlib') for m in sys.modules))"],
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
