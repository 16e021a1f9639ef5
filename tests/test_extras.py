"""Without the libraries of an extra, what needs them names the pip command that installs them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from cllm import CllmError, MissingExtraError
from cllm.errors import extra
from tests.conftest import few_in_fast

ENGINE = """
    import anyio
    from cllm import Engine

    async def main():
        async with Engine({options}) as engine:
            await engine.{call}

    anyio.run(main)
"""
CASES = {
    "server": ("fastapi", "from cllm.server import create_app"),
    "client": ("httpx", "import cllm.client"),
    "langchain": ("langchain_core", "import cllm.integrations.langchain"),
    "llama-index": ("llama_index", "import cllm.integrations.llama_index"),
    "pydantic-ai": ("pydantic_ai", "import cllm.integrations.pydantic_ai"),
    "ray": ("ray", "from cllm.ray import app"),
    "tracing": (
        "opentelemetry.exporter",
        "from cllm.server.operation.tracing import Tracing; Tracing('http://127.0.0.1:1')",
    ),
    "hub": ("huggingface_hub", ENGINE.format(options="'hf:user/repo'", call="health()")),
    "process": ("msgspec", ENGINE.format(options="process=True", call="health()")),
    "structured": (
        "llguidance",
        ENGINE.format(options="", call="""generate("1+1=", grammar='root ::= "2"')"""),
    ),
    "structured: Lark": (
        "llguidance",
        ENGINE.format(options="", call="""generate("1+1=", lark='start: "2"')"""),
    ),
    "chat": ("jinja2", ENGINE.format(options="", call="chat([{'role': 'user', 'content': 'a'}])")),
    "media: images": ("PIL", "from cllm.engine.media_child import pixels_of; pixels_of(b'x')"),
    **{
        f"media: {module}": (
            module,
            "from cllm.engine.media_child import samples_of; samples_of(b'x', 8000)",
        )
        for module in ("soundfile", "soxr")
    },
    "testing": (
        "yaml",
        "from pathlib import Path; from cllm.testing.fake_rules import FakeRules;"
        " Path('rules.yaml').write_text('{}'); FakeRules.read(Path('rules.yaml'))",
    ),
}


FAST = ("server", "hub", "structured")


def test_a_missing_extra_is_an_error_of_cllm_and_of_an_import() -> None:
    with pytest.raises(CllmError), extra("server"):
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401
    assert issubclass(MissingExtraError, ImportError)
    with pytest.raises(ModuleNotFoundError), extra("server"):
        import cllm.no_such_module  # type: ignore[import-not-found]  # noqa: F401


@pytest.mark.parametrize("name", few_in_fast(CASES, FAST.__contains__))
def test_a_missing_extra_names_its_pip_command(name: str, tmp_path: object) -> None:
    library, program = CASES[name]
    extra = name.partition(":")[0]
    hidden = f"import sys; sys.modules[{library!r}] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", hidden + textwrap.dedent(program)],
        cwd=str(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"pip install 'cllm[{extra}]'" in done.stderr.splitlines()[-1]
