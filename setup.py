"""The part of the build that pyproject.toml cannot describe: a wheel contains libllama, so it is for one
platform.

An editable install builds nothing here: `build_llama.sh` links the library into the package.
The environment variable `CLLM_BUILD_OPTIONS` passes further options to `build_llama.sh`, such as `--vulkan`.
"""

import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
STEP = re.compile(r"\[(\d+)/(\d+)\]")  # ninja's


class BuildWithLibrary(build_py):
    def run(self) -> None:
        if not self.editable_mode:  # before anything is copied, so that an error is the last line
            build_library(Path(self.build_lib).resolve() / "cllm" / "_native")
        super().run()


def build_library(target: Path) -> None:
    """Build libllama with portable CPU flags: the wheel will travel to other machines."""
    command = [str(HERE / "build_llama.sh"), "--portable", "--verbose", "--prefix", str(target)]
    command += shlex.split(os.environ.get("CLLM_BUILD_OPTIONS", ""))
    # The interpreter that pip builds with, and no other, has the build requirements.
    environment = os.environ | {"PYTHON": sys.executable}
    last, shown = "", -1
    with subprocess.Popen(
        command,
        env=environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as build:
        assert build.stdout is not None
        for line in build.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
            step = STEP.match(line)
            if step is None:
                if line.startswith(("downloading", "building", "waiting")):
                    tell(line.split(",")[0].strip())
            elif (percent := 100 * int(step[1]) // int(step[2])) >= shown + 10:
                shown = percent // 10 * 10
                tell(f"compiling llama.cpp: {shown} %")
    if build.returncode:
        raise SystemExit(f"cllm: libllama was not built: {last.removeprefix('build_llama.sh: ')}")


def tell(text: str) -> None:
    """Write a line to the terminal, if there is one: pip keeps the output of a build to itself."""
    with suppress(OSError), Path("/dev/tty").open("w") as terminal:
        print(f"\r\033[K  cllm: {text}", file=terminal)


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        # ctypes: any Python 3 of this platform can load the library.
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel},
    distclass=PlatformDistribution,
)
