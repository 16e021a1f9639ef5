"""What pyproject.toml cannot say: a wheel carries libllama, so it is built for one platform.

An editable install builds nothing here: `build_llama.sh` links the library into the package.
"""

import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        # Portable CPU flags: the wheel will travel to other machines.
        target = Path(self.build_lib).resolve() / "cllm" / "_native"
        subprocess.run(
            [str(HERE / "build_llama.sh"), "--portable", "--prefix", str(target)], check=True
        )


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
