"""A project of its own for build_llama.sh, with programs in place of cmake, ninja, pip and compilers.

The stand-ins are shell scripts on PATH.  They log their arguments and write the files that the real
programs would write.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from tools.native import change_llama

PROJECT = Path(__file__).resolve().parents[2]
SCRIPT = (PROJECT / "build_llama.sh").read_text(encoding="utf-8")
SDIST, REQUIREMENT, TREE, SDIST_SHA256 = (
    re.findall(rf"\b{name}=(\S+)", SCRIPT)[0]
    for name in ("SDIST", "REQUIREMENT", "TREE", "SDIST_SHA256")
)
DEADLINE_S = 60

SOURCE_FILES = {
    "CMakeLists.txt": "".join(
        f"set(LLAMA_VERSION_{part} {number})\n"
        for part, number in (("MAJOR", 9), ("MINOR", 8), ("PATCH", 7))
    )
    + "option(LLAMA_BUILD_MTMD)\n",
    "LICENSE": "MIT License",
    "include/llama.h": "// llama.h",
    "ggml/include/ggml.h": "// ggml.h",
    "ggml/include/ggml-cpu.h": "// ggml-cpu.h",
    "ggml/include/gguf.h": "// gguf.h",
    "tools/mtmd/mtmd.h": "// mtmd.h",
    "vendor/hash/sha256/LICENSE": "Public domain",
    "vendor/stb/stb_image.h": "code\n/*\nThis software is available under 2 licenses\n*/\n",
    **{str(file): "".join(edits) for file, edits in change_llama.EDITS.items()},
    **{f"{name}/CMakeLists.txt": "" for name in ("cmake", "common", "src", "tools", "vendor")},
}

STAND_INS = {
    "cmake": r"""
        [ "$1" != --version ] || { echo "cmake version 3.99.0"; exit; }
        printf '%s\n' "$@" >>"$STUB/cmake.log"
        printf '%s\n' "$@" >"$STUB/cmake.last"
        """,
    # ninja -C DIRECTORY -j N TARGET...; $NINJA is "fails", "blocks", or empty for success.
    "ninja": r"""
        echo "$*" >>"$STUB/ninja.log"
        [ "$NINJA" != fails ] || { echo "FAILED: ggml.c.o"; exit 1; }
        if [ "$NINJA" = blocks ]; then
          echo $$ >"$STUB/started"
          read -r _ <"$STUB/release"
        fi
        mkdir -p "$2/bin"
        cpu=libggml-cpu
        ! grep -q CPU_ALL_VARIANTS=ON "$STUB/cmake.last" ||
          cpu="libggml-cpu-haswell libggml-cpu-sapphirerapids libggml-cpu-x64"
        mtmd=
        case "$*" in *mtmd*) mtmd=libmtmd ;; esac
        for name in libllama libggml libggml-base $cpu $mtmd; do
          echo "$name" >"$2/bin/$name.so"
        done
        case "$*" in *llama-server*)
          for name in llama-server llama-bench llama-batched-bench llama-quantize; do
            echo "$name" >"$2/bin/$name"
          done
          echo common >"$2/bin/libllama-common.so" ;;
        esac
        """,
    # $AMX and $DECODE choose what the "compiled" programs do; an empty $AMX means a CPU without AMX.
    "cc": r"""
        case "$*" in
          --version) echo "cc (stand-in) ${CC_VERSION:-1.0}"; exit ;;
          *-dM*) [ -z "$AMX" ] || echo "#define __AMX_INT8__ 1"; exit ;;
          *amx_probe.c*) result=$AMX ;;
          *) result=$DECODE ;;
        esac
        while [ "$1" != -o ]; do shift; done
        case $result in
          dies) echo 'kill -SEGV $$' >"$2" ;;
          wrong) echo 'echo "Q4_0: a logit is not finite"; exit 1' >"$2" ;;
          old-cpu) echo 'case $3 in *haswell.so) exit 3 ;; esac' >"$2" ;;
          haswell-dies) echo 'case $3 in *haswell.so) kill -SEGV $$ ;; esac' >"$2" ;;
          *) echo 'echo ok' >"$2" ;;
        esac
        sed -i '1i #!/bin/sh' "$2"
        chmod +x "$2"
        """,
    "c++": 'echo "c++ (stand-in) 1.0"',
    "ldd": r'echo "	libgomp.so.1 => $STUB/libgomp.so.1 (0x00007f0000000000)"',
    "python": r"""
        [ "$1 $2 $3" = "-m pip download" ] || exec "$REAL_PYTHON" "$@"
        echo "$*" >>"$STUB/pip.log"
        while [ "$1" != --dest ]; do shift; done
        cat "$2/requirements.txt" >>"$STUB/pip.log"
        cp "$STUB/sdist.tar.gz" "$2/SDIST.tar.gz"
        """.replace("SDIST", SDIST),
}

# Stand-in for the comparison of headers; $HEADERS names the header that differs.
CHECK_HEADERS = """
import os, pathlib, sys
with open(os.environ["STUB"] + "/headers.log", "a") as log:
    print(*sys.argv[3:], file=log)
records = pathlib.Path(sys.argv[2])
if os.environ["HEADERS"] == sys.argv[1]:
    sys.exit("  a_function: conflicting types")
if sys.argv[1] == "mtmd.h":
    sys.exit()
records.mkdir(parents=True, exist_ok=True)
(records / f"{os.environ['DECLARATIONS']}.json").write_text("{}")
"""


def write_program(path: Path, body: str) -> None:
    """Write a stand-in, a shell script that runs `body`."""
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def write_sdist(path: Path) -> None:
    """Write the archive that pip would download: llama.cpp inside another project."""
    files = {f"{SDIST}/{TREE}/{name}": text for name, text in SOURCE_FILES.items()}
    with tarfile.open(path, "w:gz") as archive:
        for name, text in {**files, f"{SDIST}/setup.py": "raise SystemExit"}.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write_tree(tree: Path) -> Path:
    """Write the source of llama.cpp as a checkout has it, and return its folder."""
    for name, text in SOURCE_FILES.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")
    return tree


@dataclasses.dataclass(frozen=True)
class Sandbox:
    """A copy of the script in a project of its own, with a cache and stand-ins of its own."""

    project: Path
    cache: Path
    stub: Path

    @property
    def link(self) -> Path:
        return self.project / "cllm" / "_native"

    @property
    def native(self) -> Path:
        return self.cache / "cllm" / "native"

    def environment(self, **variables: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k not in ("CC", "CXX", "PYTHON")}
        return inherited | {
            "PATH": f"{self.stub / 'bin'}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(self.cache),
            "PYTHON": "python",
            "REAL_PYTHON": sys.executable,
            "CLLM_CHECK_MODEL": str(self.stub / "model.gguf"),
            "STUB": str(self.stub),
            "NINJA": "",
            "AMX": "",
            "DECODE": "",
            "HEADERS": "",
            "DECLARATIONS": "first",
            **variables,
        }

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.project / "build_llama.sh"), *arguments],
            env=self.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments, **variables) as process:
            stdout, stderr = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def build(self, *arguments: str, **variables: str) -> str:
        result = self.run(*arguments, **variables)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def log(self, program: str) -> list[str]:
        path = self.stub / f"{program}.log"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def installed(self) -> list[str]:
        """Return the sorted names in the directory of builds, unfinished ones included."""
        return names_in(self.native) if self.native.exists() else []

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.link / "build.json").read_text(encoding="utf-8"))
        return record


def make_sandbox(directory: Path) -> Sandbox:
    """Make a sandbox with all files that a run of the script needs."""
    made = Sandbox(directory / "project", directory / "cache", directory / "stub")
    (made.project / "cllm").mkdir(parents=True)
    (made.stub / "bin").mkdir(parents=True)
    shutil.copytree(PROJECT / "tools" / "native", made.project / "tools" / "native")
    check_headers = made.project / "tools" / "native" / "check_headers.py"
    check_headers.write_text(CHECK_HEADERS, encoding="utf-8")
    for name, body in STAND_INS.items():
        write_program(made.stub / "bin" / name, body)
    for name in ("model.gguf", "libgomp.so.1"):
        (made.stub / name).write_text(name, encoding="utf-8")
    for name in ("started", "release"):
        os.mkfifo(made.stub / name)

    write_sdist(made.stub / "sdist.tar.gz")
    sha256 = hashlib.sha256((made.stub / "sdist.tar.gz").read_bytes()).hexdigest()
    assert SCRIPT.count(SDIST_SHA256) == 1
    copy = made.project / "build_llama.sh"
    copy.write_text(SCRIPT.replace(SDIST_SHA256, sha256), encoding="utf-8")
    copy.chmod(0o755)
    return made
