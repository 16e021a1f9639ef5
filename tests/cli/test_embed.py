"""`cllm embed`: vectors of arguments and of lines."""

from __future__ import annotations

import errno
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from cllm.cli.embed import N_AT_ONCE, _parts, _save
from cllm.cli.terminal import InputLine
from tests.cli.children import run_cllm

MEAN = ("--pooling", "mean")
TEXTS = ["one", "two words", "你好"]


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_text_is_a_line_of_json() -> None:
    done = run_cllm("embed", *TEXTS, *MEAN)
    assert (done.returncode, done.stderr) == (0, "")
    rows = rows_of(done.stdout)
    assert [(row["index"], row["text"]) for row in rows] == list(enumerate(TEXTS))
    vectors = np.array([row["embedding"] for row in rows])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)


def test_an_array_has_the_same_numbers(tmp_path: Path) -> None:
    lines = "".join(f"line {i}\n" for i in range(1100))
    path = tmp_path / "vectors"
    done = run_cllm("embed", "first", "-", "-o", str(path), *MEAN, input=lines)
    assert done.returncode == 0
    assert done.stdout == ""
    assert "1,101 vectors" in done.stderr
    vectors = np.load(path)
    assert vectors.dtype == np.float32
    assert vectors.shape[0] == 1101
    (row,) = rows_of(run_cllm("embed", "line 1099", *MEAN).stdout)
    np.testing.assert_allclose(vectors[-1], row["embedding"], atol=1e-3)


def test_vectors_may_be_cut_and_left_as_they_are() -> None:
    (raw,) = rows_of(run_cllm("embed", "one", "--no-normalize", *MEAN).stdout)
    (cut,) = rows_of(run_cllm("embed", "one", "--dimensions", "4", *MEAN).stdout)
    first = np.array(raw["embedding"])[:4]
    np.testing.assert_allclose(cut["embedding"], first / np.linalg.norm(first), rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "text", "said"),
    [
        (("-",), "one\n\nthree\n", "text 2 is '', must be a text that is not empty"),
        (("x" * 600,), "", "text 1 is '601 tokens', must be at most 512"),
        (("one", "--dimensions", "0"), "", "dimensions is 0, must be 1 to"),
    ],
)
def test_what_cannot_be_embedded_is_one_line_and_exit_code_1(
    arguments: tuple[str, ...], text: str, said: str
) -> None:
    done = run_cllm("embed", *arguments, *MEAN, input=text)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("path", "said"),
    [("/nowhere/file", "there is no directory /nowhere"), ("/", "/ cannot be written")],
)
def test_an_array_that_cannot_be_written_is_rejected_before_a_text_is_read(
    path: str, said: str
) -> None:
    done = run_cllm("embed", "-", "-o", path, "-m", "missing.gguf")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_an_array_that_the_disk_has_no_room_for_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(file: BinaryIO, _: object) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    path, vectors = tmp_path / "vectors", np.zeros((1, 1), np.float32)
    _save(path, vectors)
    before = path.read_bytes()
    monkeypatch.setattr(np, "save", fill)
    with pytest.raises(OSError, match="No space left"):
        _save(path, vectors)
    assert path.read_bytes() == before
    assert [*tmp_path.iterdir()] == [path]


def test_a_model_that_is_not_told_how_to_pool_says_so() -> None:
    done = run_cllm("embed", "one")
    assert done.returncode == 1
    assert "pooling is None, must be mean, cls or last" in done.stderr


def test_a_long_text_is_cut_where_that_is_asked_for() -> None:
    (row,) = rows_of(run_cllm("embed", "x" * 600, "--truncate", *MEAN).stdout)
    assert row["index"] == 0


@pytest.mark.anyio
async def test_standard_input_is_read_in_parts_however_many_texts_stand_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lines() -> AsyncIterator[InputLine]:
        for number in range(N_AT_ONCE):
            yield InputLine(number + 1, str(number))

    monkeypatch.setattr("cllm.cli.embed.input_lines", lines)
    for n_before in (0, 1, N_AT_ONCE, N_AT_ONCE + 5):
        parts = [part async for part in _parts([*map(str, range(n_before)), "-"])]
        assert sum(map(len, parts)) == n_before + N_AT_ONCE
        assert all(len(part) <= max(N_AT_ONCE, n_before + 1) for part in parts)
