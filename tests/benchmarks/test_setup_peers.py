"""What tools/setup_peers.sh promises, with programs in place of Python, pip and the build."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SDIST = "llama_cpp_python-9.8.7"

# Both the Python that makes the environment and the one in it; pip fails for $REFUSED.
PYTHON = r"""#!/usr/bin/env bash
case "$*" in
  -V) echo "Python 3.99" ;;
  "-c "*platlib*) echo "$(dirname "$0")/../packages" ;;
  "-c "*) ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip "*)
    echo "CMAKE_ARGS=$CMAKE_ARGS $*" >>"$LOG"
    if [ -n "$REFUSED" ]; then case "$*" in *"$REFUSED"*) echo "no $REFUSED" >&2; exit 1 ;; esac; fi
    case "$*" in *--requirement*) cat "${@: -1}" >>"$LOG" ;; esac
    case "$*" in *llama_cpp_python*) mkdir -p "$(dirname "$0")/../packages/llama_cpp" ;; esac ;;
esac
"""
BUILD = """#!/usr/bin/env bash
readonly SDIST={sdist} REQUIREMENT=llama-cpp-python==9.8.7
readonly SDIST_SHA256={sha256}
[ "$*" = "--as-linked --tools" ] && mkdir -p "$PWD/build/lib" && ln -sfn "$PWD/build" cllm/_native
"""


class Checkout:
    """A copy of the script beside stand-ins for all that it calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("tools", "cllm", "bin", "cache/cllm/src"):
            (root / name).mkdir(parents=True)
        shutil.copy(ROOT / "tools" / "setup_peers.sh", root / "tools")
        self.archive = root / "cache" / "cllm" / "src" / f"{SDIST}.tar.gz"
        with tarfile.open(self.archive, "w:gz") as archive:
            member = tarfile.TarInfo(f"{SDIST}/examples/server/server.py")
            member.size = len(b"app")
            archive.addfile(member, io.BytesIO(b"app"))
        sha256 = hashlib.sha256(self.archive.read_bytes()).hexdigest()
        self.program("build_llama.sh", BUILD.format(sdist=SDIST, sha256=sha256))
        self.program("bin/python3", PYTHON)

    def program(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)
        (self.root / name).chmod(0o755)

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "tools" / "setup_peers.sh")],
            env={
                "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
                "HOME": str(self.root),
                "XDG_CACHE_HOME": str(self.root / "cache"),
                "LOG": str(self.root / "pip.log"),
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def pip_calls(self) -> list[str]:
        log = self.root / "pip.log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a checkout")


def test_all_peers_are_installed_over_the_library_of_cllm(checkout: Checkout) -> None:
    done = checkout.run()

    assert (done.returncode, done.stderr) == (0, "")
    venv = checkout.root / ".venv-peers"
    assert (venv / "server.py").read_text() == "app"
    assert (venv / "packages" / "llama_cpp" / "lib").resolve() == checkout.root / "build" / "lib"
    binding, server, wheel = checkout.pip_calls
    assert binding.startswith("CMAKE_ARGS=-DLLAMA_BUILD=OFF ")
    assert binding.endswith(str(checkout.archive))
    assert "fastapi" in server
    assert "--only-binary xllamacpp xllamacpp==" in wheel


def test_a_second_run_installs_nothing(checkout: Checkout) -> None:
    checkout.run()
    n_calls = len(checkout.pip_calls)

    assert checkout.run().returncode == 0
    assert len(checkout.pip_calls) == n_calls


def test_a_peer_that_cannot_be_installed_is_named_and_tried_again(checkout: Checkout) -> None:
    done = checkout.run(REFUSED="xllamacpp==")

    assert done.returncode == 0
    assert done.stderr.splitlines() == ["no xllamacpp==", "not installed, see above: xllamacpp"]
    assert (checkout.root / ".venv-peers" / "server.py").exists()
    n_calls = len(checkout.pip_calls)

    assert checkout.run().stderr == ""
    assert len(checkout.pip_calls) == n_calls + 1


def test_another_archive_than_the_pinned_one_is_not_installed(checkout: Checkout) -> None:
    checkout.archive.write_bytes(b"something else")

    done = checkout.run()

    assert "llama-cpp-python" in done.stderr
    assert "example-server" in done.stderr
    assert not any(str(checkout.archive) in call for call in checkout.pip_calls)


def test_an_archive_that_the_cache_lost_is_downloaded_by_its_hash(checkout: Checkout) -> None:
    sha256 = hashlib.sha256(checkout.archive.read_bytes()).hexdigest()
    checkout.archive.unlink()

    checkout.run()

    assert " download --no-deps --no-binary llama-cpp-python " in checkout.pip_calls[0]
    assert checkout.pip_calls[1] == f"llama-cpp-python==9.8.7 --hash=sha256:{sha256}"


def test_the_environment_may_be_elsewhere(checkout: Checkout, tmp_path: Path) -> None:
    checkout.run(CLLM_PEERS=str(tmp_path / "peers"))

    assert (tmp_path / "peers" / "server.py").exists()
    assert not (checkout.root / ".venv-peers").exists()
