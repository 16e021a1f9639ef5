"""Write `cllm/bindings/known_libraries.json`: libraries of other projects that cllm can load as they are.

Each package is downloaded from its registry, and the headers of its llama.cpp are compared with the
declarations.  Then a child process decodes with the library.  Tokens and default parameters must equal
those of cllm's own library, and logits may differ by `MAX_DIFFERENCE`.  A library that differs is not listed.

    python -m tools.known_libraries
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cllm.bindings import Batch, Context, Model, library
from cllm.bindings import _llama_h as h
from cllm.bindings import _mtmd_h as m
from cllm.bindings._layout import KNOWN_LIBRARIES
from cllm.engine.config import EMBEDDED_MODEL
from tools.bump import fetched
from tools.native.check_headers import complaints, layout

PROMPT = list(range(97, 117))
N_STEPS = 24
MAX_DIFFERENCE = 0.05  # of logits: code for other CPU instructions rounds differently


@dataclass(frozen=True)
class Package:
    """A package with a library.

    Parameters
    ----------
    name : str
        Name in the list and in messages.
    kind : str
        Registry client: "npm" or "pip".
    requirement : str
        Package and version, in the form that the client takes.
    file : str
        Glob pattern of the library file in the package.
    headers : str
        Requirement of a source distribution on PyPI that has the headers of the same llama.cpp.
    """

    name: str
    kind: str
    requirement: str
    file: str
    headers: str


NODE, NODE_HEADERS = "3.22.1", "llama-cpp-python==0.3.36"
XLLAMACPP = "xllamacpp==2026.10.11549"
PACKAGES = (
    *(
        Package(
            f"node-llama-cpp {NODE} {system}", "npm", f"@node-llama-cpp/{system}@{NODE}",
            "libllama.*so", NODE_HEADERS,
        )
        for system in ("linux-x64", "linux-x64-vulkan", "linux-x64-cuda")
    ),
    Package(XLLAMACPP, "pip", XLLAMACPP, "xllamacpp.abi3.so", XLLAMACPP),
)  # fmt: skip


def main() -> int:
    """Write the list."""
    if sys.argv[1:] == ["--decode"]:
        print(json.dumps(decode()))
        return 0
    expected = decode()
    listed: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, package in enumerate(PACKAGES):
            binaries, sources = (Path(folder) / f"{number}-{kind}" for kind in ("binary", "source"))
            binaries.mkdir()
            found = downloaded(package, binaries)
            source = fetched(package.headers, sources)
            if wrong := complaints(h.DECLARATIONS, source.headers):
                print(f"{package.name} does not fit: {wrong}")
                continue
            structs = layout(h.DECLARATIONS, source.headers)
            if b"mtmd_init_from_file" in found.read_bytes():
                assert not complaints(m.DECLARATIONS, source.headers), package.name
                structs |= layout(m.DECLARATIONS, source.headers)
            entry = {
                "name": package.name,
                "commit": package.name,
                "portable": True,
                "version": ".".join(map(str, source.version)),
                "sha256": hashlib.sha256(found.read_bytes()).hexdigest(),
                "structs": structs,
            }
            write([*listed, entry])
            told = difference(decoded_with(found), expected)
            print(f"{package.name}: {told or 'the same logits'}")
            if not told:
                listed.append(entry)
    write(listed)
    return 0


def write(listed: list[dict[str, Any]]) -> None:
    """Write a list of known libraries."""
    digests = [h.DECLARATIONS.digest, m.DECLARATIONS.digest]
    known = {"declarations": digests, "libraries": listed}
    KNOWN_LIBRARIES.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def downloaded(package: Package, folder: Path) -> Path:
    """Download a package into an empty folder, and return the path of its library."""
    if package.kind == "npm":
        run("npm", "pack", "--silent", package.requirement, cwd=folder)
    else:
        run(*PIP, "--only-binary", ":all:", package.requirement, cwd=folder)
    (archive,) = folder.iterdir()
    shutil.unpack_archive(archive, folder, "gztar" if package.kind == "npm" else "zip")
    (library,) = folder.rglob(package.file)
    return library


PIP = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")


def decoded_with(library: Path) -> dict[str, Any]:
    """Return what a child process decodes with this library."""
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, "--decode"],
        env=os.environ | {"CLLM_LIBRARY": str(library)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"failure": done.stderr.strip().splitlines()[-1:]}
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def decode() -> dict[str, Any]:
    """Return the greedy tokens after a prompt, every 16th logit of each, and the default parameters."""
    lib = library()
    tokens: list[int] = []
    logits: list[list[float]] = []
    with Model(str(EMBEDDED_MODEL), n_gpu_layers=0) as model, Context(model, n_ctx=256) as context:
        pos, rows = 0, PROMPT
        for _ in range(N_STEPS):
            batch = Batch(len(rows))
            batch.add(0, rows, pos, n_outputs=1)
            row = context.decode(batch).rows[-1]
            pos, rows = pos + len(rows), [int(row.argmax())]
            tokens += rows
            logits.append([float(value) for value in row[::16]])
    defaults = {
        f"{struct}.{field}": value
        for struct in ("llama_model_params", "llama_context_params")
        for field in h.DECLARATIONS.fields[struct]
        if isinstance(
            value := getattr(getattr(lib, f"{struct[:-7]}_default_params")(), field), int | float
        )
    }
    return {"tokens": tokens, "logits": logits, "defaults": defaults}


def difference(told: dict[str, Any], expected: dict[str, Any]) -> str:
    """Return how two decodes differ; empty if they are the same."""
    if "failure" in told:
        return f"it fails: {told['failure']}"
    for name in ("tokens", "defaults"):
        if told[name] != expected[name]:
            return f"other {name}: {told[name]}, not {expected[name]}"
    most = float(np.abs(np.subtract(told["logits"], expected["logits"])).max())
    return "" if most <= MAX_DIFFERENCE else f"logits differ by {most}"


def run(*command: str, cwd: Path) -> None:
    """Run a program, which has to succeed."""
    subprocess.run(command, cwd=cwd, check=True)


if __name__ == "__main__":
    sys.exit(main())
