"""Build the documentation site: `make docs`.  The site loads nothing from other hosts.

The pages are symbolic links to those of the repository, so that their relative links work in both places.
The reference is generated from the docstrings.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cllm
import cllm.bindings
import cllm.client
import cllm.errors
import cllm.sync
import cllm.testing

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "docs" / "source"
PAGES = (
    "README.md", "README.zh-CN.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md",
    "SECURITY.md", "docs", "benchmarks/results", "cllm/models", "tests/reliability/results",
)  # fmt: skip


def reference() -> dict[str, str]:
    """Return the pages of the reference by name: a line for each public name."""
    errors = [name for name in cllm.errors.__all__ if name[0].isupper()]
    engine = ["Engine", "TokenStream", "Embedder", "EngineConfig", "SamplingParams"]
    values = [name for name in cllm.__all__ if name not in {*errors, *engine}]
    pages = {
        "engine": ("Engine", "cllm", engine),
        "values": ("Values", "cllm", values),
        "sync": ("Without an event loop", "cllm.sync", ("Engine", "TokenStream")),
        "errors": ("Errors", "cllm.errors", errors),
        "client": ("Client", "cllm.client", cllm.client.__all__),
        "server": ("Server", "cllm.server", ("create_app", "ServerConfig")),
        "testing": ("Testing", "cllm.testing", cllm.testing.__all__),
        "bindings": ("Bindings", "cllm.bindings", cllm.bindings.__all__),
    }
    return {
        name: f"# {title}\n" + "".join(f"\n::: {module}.{each}\n" for each in names)
        for name, (title, module, names) in pages.items()
    }


def main() -> int:
    """Build the site; the exit code is mkdocs' own."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for page in PAGES:
        place = SOURCE / page
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(ROOT / page)
    (SOURCE / "reference").mkdir()
    for name, text in reference().items():
        (SOURCE / "reference" / f"{name}.md").write_text(text)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
