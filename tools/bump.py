"""Move the pin to another llama.cpp whose source is on PyPI, or only try that one.

    python -m tools.bump                           the newest llama.cpp of the packages in `SOURCES`
    python -m tools.bump xllamacpp==2026.10.11549  this release
    python -m tools.bump --dry-run                 build and test, but change no file of the project

The headers are compared with those of the pin (functions, fields, deprecations) and with cllm's
declarations.  If they fit, the pin is edited, the library is built, and the fast tests and the hazards
run with it.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.native.check_headers import DECLARATIONS, complaints, declarations_of

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build_llama.sh"
# Packages whose source distribution has all of llama.cpp, and the directory that it is in.
SOURCES = {"llama-cpp-python": "vendor/llama.cpp", "xllamacpp": "thirdparty/llama.cpp"}
VERSION = re.compile(r"set\(LLAMA_VERSION_(?:MAJOR|MINOR|PATCH)\s+(\d+)\)")
FUNCTION = re.compile(r"LLAMA_API\b[^;{}]*?\b(llama_\w+)\s*\(")
DEPRECATED = re.compile(r"DEPRECATED\s*\([^;]*?\b(llama_\w+)\s*\(")
STRUCT = re.compile(r"struct (llama_\w+) \{(.*?)\n    \}", re.S)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


@dataclass(frozen=True)
class Source:
    """A source distribution, unpacked.

    Attributes
    ----------
    requirement : str
        Requirement for pip, such as `xllamacpp==2026.10.11549`.
    archive, tree : Path
        Archive file, and the unpacked directory of llama.cpp.
    version : tuple of int
        Version of llama.cpp, from its `CMakeLists.txt`.
    commit : str
        First nine digits of llama.cpp's commit, or `b` and the number of its build.
    """

    requirement: str
    archive: Path
    tree: Path
    version: tuple[int, ...]
    commit: str

    @property
    def headers(self) -> list[Path]:
        """Directories with the headers."""
        return [self.tree / name for name in ("include", "ggml/include", "tools/mtmd")]

    @property
    def directory(self) -> str:
        """Directory of llama.cpp in the archive."""
        return SOURCES[self.requirement.partition("=")[0]]


def main() -> int:
    """Compare, edit, build and test; the exit code is 1 if something does not fit or fails."""
    given = [each for each in sys.argv[1:] if each != "--dry-run"]
    is_dry = "--dry-run" in sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        wanted = given or [newest_release(name) for name in SOURCES]
        found = [fetched(each, Path(folder) / str(i)) for i, each in enumerate(wanted)]
        source = max(found, key=lambda each: each.version)
        pinned = fetched(pin("REQUIREMENT"), Path(folder) / "pin")
        print(f"from {told(pinned)}\nto   {told(source)}")
        if source.version < pinned.version and not given:
            print("the pin is newer")
            return 0
        print("\n".join(differences(pinned, source)) or "llama.h declares the same")
        if wrong := complaints(declarations_of("llama.h"), source.headers):
            print(*(f"does not fit: {name}: {text}" for name, text in wrong.items()), sep="\n")
            return 1
        if wrong := complaints(declarations_of("mtmd.h"), source.headers):
            print(*(f"no images: {name}: {text}" for name, text in wrong.items()), sep="\n")
            return 1
        print("the headers fit cllm's declarations")
        if is_dry:
            prefix = Path(folder) / "built"
            return run(BUILD, "--source", source.tree, "--prefix", prefix) or tested(prefix)
        edit(source)
        return run(BUILD, "--as-linked") or tested(None)


def told(source: Source) -> str:
    """Return a line that describes a source: its requirement, commit and version."""
    return f"{source.requirement}: llama.cpp {source.commit}, {'.'.join(map(str, source.version))}"


def pin(name: str) -> str:
    """Return a value of the pin in `build_llama.sh`."""
    found = re.search(rf"\b{name}=(\S+)", BUILD.read_text(encoding="utf-8"))
    assert found is not None, name
    return found[1]


def newest_release(name: str) -> str:
    """Return the requirement of the newest release of a package."""
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"\((\S+)\)", done.stdout)
    assert found is not None, done.stdout
    return f"{name}=={found[1]}"


def fetched(requirement: str, folder: Path) -> Source:
    """Return a source distribution, downloaded and unpacked into a new directory."""
    folder.mkdir()
    name = requirement.partition("=")[0]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name]
    subprocess.run([*pip, "--dest", folder, requirement], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (root,) = (path for path in folder.iterdir() if path.is_dir())
    tree = root / SOURCES[name]
    numbers = VERSION.findall((tree / "CMakeLists.txt").read_text(encoding="utf-8"))
    return Source(requirement, archive, tree, tuple(map(int, numbers)), commit_of(root, tree))


def commit_of(root: Path, tree: Path) -> str:
    """Return nine digits of the commit of llama.cpp's submodule, or `b` and the last part of the version."""
    index = ["git", "-C", str(root), "ls-files", "--stage", str(tree.relative_to(root))]
    if (root / ".git").exists():
        done = subprocess.run(index, capture_output=True, text=True, check=False)
        if found := re.match(r"160000 ([0-9a-f]{9})", done.stdout):
            return found[1]
    return "b" + root.name.rpartition(".")[2]


def differences(pinned: Source, source: Source) -> list[str]:
    """Return what llama.h declares in one version and not in the other."""
    old, new = (
        COMMENT.sub("", (each.headers[0] / "llama.h").read_text(encoding="utf-8"))
        for each in (pinned, source)
    )
    lines = []
    for what, pattern in (("function", FUNCTION), ("deprecated", DEPRECATED)):
        before, after = set(pattern.findall(old)), set(pattern.findall(new))
        lines += [f"- {what} {name}" for name in sorted(before - after)]
        lines += [f"+ {what} {name}" for name in sorted(after - before)]
    structs, others = dict(STRUCT.findall(old)), dict(STRUCT.findall(new))
    for name in sorted(structs.keys() | others.keys()):
        before, after = (set(_fields(each.get(name, ""))) for each in (structs, others))
        lines += [f"- field {name}.{field}" for field in sorted(before - after)]
        lines += [f"+ field {name}.{field}" for field in sorted(after - before)]
    return lines


def _fields(body: str) -> list[str]:
    return [line.replace("*", " ").split()[-1] for line in body.split(";") if line.strip()]


def edit(source: Source) -> None:
    """Write the pin into `build_llama.sh` and the declarations."""
    sha256 = hashlib.sha256(source.archive.read_bytes()).hexdigest()
    replace(BUILD, "COMMIT", source.commit)
    replace(BUILD, "SDIST", source.archive.name.removesuffix(".tar.gz"))
    replace(BUILD, "REQUIREMENT", source.requirement)
    replace(BUILD, "SDIST_SHA256", sha256)
    replace(BUILD, "TREE", source.directory)
    text = DECLARATIONS.read_text(encoding="utf-8")
    for name, value in (("COMMIT", source.commit), ("VERSION", ".".join(map(str, source.version)))):
        text = re.sub(rf'(?m)^LLAMA_CPP_{name} = ".*"$', f'LLAMA_CPP_{name} = "{value}"', text)
    DECLARATIONS.write_text(text, encoding="utf-8")


def replace(path: Path, name: str, value: str) -> None:
    """Replace the value of a variable of a shell script."""
    text, n = re.subn(
        rf"\b{name}=\S+", f"{name}={value}", path.read_text(encoding="utf-8"), count=1
    )
    assert n == 1, name
    path.write_text(text, encoding="utf-8")


def tested(library: Path | None) -> int:
    """Run the fast tests and the hazards, with a library or with the linked one."""
    environment = os.environ | ({} if library is None else {"CLLM_LIBRARY": str(library)})
    for command in (
        [sys.executable, "-m", "pytest", "-q", "-n", "2", "tests/bindings", "tests/engine"],
        [sys.executable, "-m", "tests.reliability.hazards"],
    ):
        if status := subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            return status
    return 0


def run(*command: object) -> int:
    """Run a program in the project."""
    return subprocess.run([*map(str, command)], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
