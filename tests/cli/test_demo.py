"""The command line: what a newcomer types first, run as a program."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from cllm.cli.demo import questions, questions_about_pictures
from cllm.cli.demo_pictures import COLOURS, N_COLUMNS, PICTURES, SIDE


def run_cllm(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m cllm` with these arguments."""
    return subprocess.run(
        [sys.executable, "-X", "dev", "-m", "cllm", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_the_demo_prints_eight_right_answers_from_shared_ticks() -> None:
    done = run_cllm("demo")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:8] == [f"{q.prompt} → {q.expected}" for q in questions()]
    assert lines[10] == "0 KV cells in use at the end"
    rows = re.search(r"([\d.]+) output rows per decoding tick", lines[9])
    assert rows is not None
    assert float(rows[1]) > 2  # 6.8 on a quiet machine; a busy one starts the eight apart
    assert done.stderr == ""


def test_the_demo_of_pictures_prints_right_answers() -> None:
    done = run_cllm("demo", "--image")
    assert done.returncode == 0, done.stderr
    asked = questions_about_pictures()
    assert done.stdout.splitlines()[: len(asked)] == [
        f"[{q.picture}] {q.prompt} → {q.expected}" for q in asked
    ]
    assert len({q.picture for q in asked}) == 6
    assert done.stderr == ""


def test_pictures_of_the_demo_are_drawn_where_they_say() -> None:
    for picture in PICTURES:
        pixels = picture.pixels()
        assert pixels.shape == (SIDE, SIDE, 3)
        is_thing = (pixels == COLOURS[picture.colour]).all(2)
        assert set(map(tuple, pixels[~is_thing].tolist())) == {COLOURS[picture.background]}
        middles = [(int(i.min()) + int(i.max())) / 2 / SIDE for i in is_thing.nonzero()]
        assert middles == pytest.approx(picture.place[::-1], abs=0.06)
        assert len(picture.shown().plain.splitlines()) == N_COLUMNS // 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hello"], "No such command 'hello'. Instead: cllm generate TEXT, or cllm --help."),
        (["chta"], "No such command 'chta'. Did you mean 'chat'?\n"),
        (["demo", "--pace", "fast"], "--pace"),
        (["demo", "--no-such-option"], "No such option"),
    ],
)
def test_wrong_usage_is_one_line_on_stderr_and_exit_code_2(
    arguments: list[str], message: str
) -> None:
    done = run_cllm(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_an_error_is_one_line_without_a_traceback_unless_debugging() -> None:
    done = run_cllm("demo", CLLM_LIBRARY="/nowhere")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "CLLM_LIBRARY" in done.stderr
    debugged = run_cllm("demo", CLLM_LIBRARY="/nowhere", CLLM_DEBUG="1")
    assert "Traceback" in debugged.stderr


def test_without_its_extra_the_command_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c",
         "import sys; sys.modules['typer'] = None; from cllm.__main__ import main; main()"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "cllm needs the extra cli: pip install 'cllm[cli]'\n"
