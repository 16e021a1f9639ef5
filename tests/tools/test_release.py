"""What a release says of itself, and what stops one."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from tools import release


def page_library(name: str) -> bytes:
    """The beginning of a library of the page, as this checkout has it."""
    return (release.ROOT / "cllm/server/page_files" / name).read_bytes()[:400]


RECORD = {
    "commit": "0c1e57098",
    "source_sha256": "ab" * 32,
    "compiler": "c++ 12.2.0",
    "media": True,
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """As far as an SBOM looks at one."""
    path = tmp_path / "cllm-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cllm/_native/build.json", json.dumps(RECORD))
        archive.writestr("cllm/_native/lib/libgomp.so.1", "OpenMP")
        for name in release.IN_PAGE:
            archive.writestr(f"cllm/server/page_files/{name}", page_library(name))
    return path


def test_what_is_inside_of_a_wheel_and_not_ours_is_named_with_its_version(wheel: Path) -> None:
    llama, *in_libmtmd, openmp, markdown, highlight, temml = release.components(wheel)
    assert (llama["name"], llama["version"]) == ("llama.cpp", "0c1e57098")
    assert llama["hashes"][0]["content"] == RECORD["source_sha256"]
    assert [each["name"] for each in in_libmtmd] == [*release.IN_LIBMTMD]
    assert openmp["hashes"][0]["content"] == hashlib.sha256(b"OpenMP").hexdigest()
    shown = (release.ROOT / "cllm/server/page_files/licences.txt").read_text(encoding="utf-8")
    for part, name in zip(
        (markdown, highlight, temml), ("markdown-it", "highlight.js", "temml"), strict=True
    ):
        assert part["name"] == name
        assert f"== {name} {part['version']}:" in shown.lower()


def test_an_earlier_release_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["release", str(tmp_path)])
    with pytest.raises(SystemExit, match="is there already"):
        release.main()


def test_a_server_that_says_something_else_stops_the_release(tmp_path: Path) -> None:
    program = tmp_path / "cllm"
    program.write_text("#!/bin/sh\necho cllm: cannot listen >&2\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match="cannot listen"), release.serving(program, {}):
        pytest.fail("it does not serve")


def test_a_server_that_does_not_end_well_stops_the_release(tmp_path: Path) -> None:
    program = tmp_path / "cllm"
    program.write_text(
        "#!/bin/sh\ntrap 'exit 3' TERM\necho cllm: a model at http://127.0.0.1:1 >&2\n"
        "while :; do sleep 0.1; done\n",
        encoding="utf-8",
    )
    program.chmod(0o755)
    with (
        pytest.raises(RuntimeError, match="exits 3 after SIGTERM"),
        release.serving(program, {"PATH": "/usr/bin:/bin"}) as address,
    ):
        assert address == "http://127.0.0.1:1"
