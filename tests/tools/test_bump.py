"""`tools/bump.py` tells what changes with another llama.cpp, and edits the pin."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tools import bump
from tools.bump import BUILD, Source, commit_of, differences, edit, pin
from tools.native.check_headers import DECLARATIONS

LLAMA_H = """
    struct llama_context_params {
        uint32_t n_ctx; // text context, 0 = from model
        void * user_data;
        %s
    };
    LLAMA_API void llama_free(struct llama_context * ctx);
    LLAMA_API int32_t llama_decode(struct llama_context * ctx, struct llama_batch batch);
    %s
"""


def source(folder: Path, field: str = "", rest: str = "") -> Source:
    """A source distribution whose llama.h has something more."""
    include = folder / "include"
    include.mkdir(parents=True)
    (include / "llama.h").write_text(LLAMA_H % (field, rest))
    archive = folder / "xllamacpp-2030.1.12345.tar.gz"
    archive.write_bytes(b"archive")
    return Source("xllamacpp==2030.1.12345", archive, folder, (9, 8, 7), "b12345")


def test_the_differences_are_functions_fields_and_deprecations(tmp_path: Path) -> None:
    old = source(tmp_path / "old", rest="LLAMA_API bool llama_gone(void); // LLAMA_API llama_note(")
    new = source(
        tmp_path / "new", "size_t * moe;",
        'DEPRECATED(LLAMA_API void llama_come(void),\n "use another");',
    )  # fmt: skip
    assert differences(old, new) == [
        "- function llama_gone", "+ function llama_come", "+ deprecated llama_come",
        "+ field llama_context_params.moe",
    ]  # fmt: skip
    assert differences(old, old) == []


def test_the_pin_is_edited_in_the_script_and_in_the_declarations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, declared = (Path(shutil.copy(each, tmp_path)) for each in (BUILD, DECLARATIONS))
    monkeypatch.setattr(bump, "BUILD", script)
    monkeypatch.setattr(bump, "DECLARATIONS", declared)
    edit(source(tmp_path / "new"))
    names = ("COMMIT", "SDIST", "REQUIREMENT", "TREE", "SDIST_SHA256")
    assert [*map(pin, names)] == [
        "b12345", "xllamacpp-2030.1.12345", "xllamacpp==2030.1.12345", "thirdparty/llama.cpp",
        hashlib.sha256(b"archive").hexdigest(),
    ]  # fmt: skip
    text = declared.read_text()
    assert 'LLAMA_CPP_COMMIT = "b12345"' in text
    assert 'LLAMA_CPP_VERSION = "9.8.7"' in text
    changed = [
        a
        for a, b in zip(*(p.read_text().splitlines() for p in (BUILD, script)), strict=True)
        if a != b
    ]
    assert len(changed) == 3
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_the_commit_is_that_of_the_submodule_or_else_the_number_of_the_release(
    tmp_path: Path,
) -> None:
    root = tmp_path / "llama_cpp_python-0.3.99"
    tree = root / "vendor" / "llama.cpp"
    tree.mkdir(parents=True)
    assert commit_of(root, tree) == "b99"
    commit = "0123456789abcdef0123456789abcdef01234567"
    for command in (
        ["init", "-q"],
        ["update-index", "--add", "--cacheinfo", f"160000,{commit},vendor/llama.cpp"],
    ):
        subprocess.run(["git", "-C", root, *command], check=True)
    assert commit_of(root, tree) == "012345678"
