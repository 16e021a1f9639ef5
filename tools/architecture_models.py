"""Write small random models of llama.cpp's architectures, with the generator of its own tests.

    python -m tools.architecture_models [ARCHITECTURE ...]

The files are F32, of about 7 MB each, and are kept in the cache directory.  The generator needs a C++
compiler and the pinned source, which `./build_llama.sh` keeps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cllm.bindings import find_library
from tools.make_model import llama_cpp_source, models_directory

CODE = Path(__file__).parent / "native" / "architecture_models.cpp"
SEED = 1
HEADERS = ("tests", "common", "include", "ggml/include", "src", "vendor")


def directory() -> Path:
    """Return the directory of the models of the pinned source."""
    return models_directory() / f"architectures-{llama_cpp_source().name}"


def ensure(architecture: str = "") -> list[Path]:
    """Return the files of an architecture, or of all; they are written first unless they are there."""
    kept = directory()
    marks = kept / "written"
    mark = marks / (architecture or "all")
    if not (mark.is_file() or (marks / "all").is_file()):
        marks.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept, prefix=".making-") as scratch:
            pattern = f"^{architecture}$" if architecture else ""
            subprocess.run([_generator(kept), pattern, str(SEED), scratch], check=True)
            for path in Path(scratch).iterdir():
                path.replace(kept / path.name)
        mark.touch()
    return sorted(kept.glob(f"{architecture or '*'}-*.gguf"))


def _generator(kept: Path) -> Path:
    """Return the program that writes models, compiled first unless it is there."""
    library, _ = find_library()
    program = kept / f"generator-{library.parent.parent.resolve().name}"
    if program.is_file():
        return program
    source, libraries = llama_cpp_source(), library.parent.resolve()
    draft = kept / f".{program.name}.{os.getpid()}"
    command = [
        os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-w", "-ffunction-sections",
        *(f"-I{source / name}" for name in HEADERS), str(CODE), "-o", str(draft),
        f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", "-pthread",
        f"-Wl,--gc-sections,-rpath,{libraries}",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    draft.replace(program)
    return program


if __name__ == "__main__":
    for each in sys.argv[1:] or [""]:
        print(*ensure(each), sep="\n")
