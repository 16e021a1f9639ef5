"""The Codex CLI, Claude Code and opencode, as npm has them, do their work on cllm's server."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cllm import Engine
from cllm.testing import FakeAnswer, FakeEngine
from tests.clients.agents.mcp_server import PIXEL
from tests.clients.conftest import served
from tools.real_model import MODEL

AGENTS = Path(sys.prefix) / "agents" / "node_modules" / ".bin"
TASK = "Do what I have said."
DONE = "That is all."
IMAGE = "<image>"  # in a prompt, in the place of an image that the model sees
SUMMARY = "Some things were done."
# The beginnings of what asks for a summary: of the Codex CLI, Claude Code and opencode.
COMPACTIONS = (
    "You are performing a CONTEXT CHECKPOINT COMPACTION",
    "CRITICAL: Respond with TEXT ONLY",
    "Here is the conversation so far:",
)
LONG = "for i in 1 2 3 4; do head -c 9000 /dev/zero | tr '\\0' a; echo; done"  # 36 kB, which agents keep
N_CTX = 400_000  # an agent's instructions alone have 50,000 bytes, each of which is a token here
SERVER = Path(__file__).parent / "agents" / "mcp_server.py"

pytestmark = pytest.mark.skipif(
    not (AGENTS / "codex").exists(), reason="the agents are not installed: node, make test-clients"
)
Step = FakeAnswer | str


def calling(name: str, **arguments: Any) -> FakeAnswer:
    """An answer that calls a tool."""
    return FakeAnswer(tool_calls=[(name, arguments)])


class Script:
    """Answers of the model: one step for each prompt of the task, then that it is done.

    Attributes
    ----------
    prompts : list of str
        Those of the task itself: agents ask for titles and summaries besides.
    n_compactions : int
        Number of prompts that asked for a summary of the task.
    after : list of str
        Prompts that came after a summary.
    """

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.prompts: list[str] = []
        self.n_compactions = 0
        self.after: list[str] = []

    def __call__(self, prompt: str) -> Step:
        if prompt.rpartition("\nuser: ")[2].startswith(COMPACTIONS):
            self.n_compactions += 1
            return SUMMARY
        if self.n_compactions:
            self.after.append(prompt)
            return DONE
        if not prompt.startswith("tools: "):
            return "A title"
        self.prompts.append(prompt)
        return self.steps.pop(0) if self.steps else DONE

    @property
    def has_compacted(self) -> bool:
        """True if it has gone on with a summary instead of what was before."""
        return SUMMARY in self.after[-1] and len(self.after[-1]) < len(self.prompts[-1])


class AgentError(Exception):
    """An agent has ended with another status than was expected."""


class Agent:
    """How an agent is called, in a home of its own."""

    def __init__(self, url: str, home: Path, n_answer_max: int = 4096) -> None:
        self.url, self.home, self.place = url, home, home / "work"
        self.n_answer_max = n_answer_max
        self.place.mkdir(parents=True)

    def run(self, command: list[str], variables: Mapping[str, str], status: int = 0) -> str:
        """Return what it has said, if it ends with `status`."""
        environment = {
            "PATH": os.environ["PATH"], "HOME": str(self.home), "TMPDIR": str(self.home),
            "NO_PROXY": "127.0.0.1", **variables,
        }  # fmt: skip
        done = subprocess.run(
            [str(AGENTS / command[0]), *command[1:]], cwd=self.place, env=environment, text=True,
            capture_output=True, stdin=subprocess.DEVNULL, timeout=240, check=False,
        )  # fmt: skip
        if done.returncode != status:
            raise AgentError(f"{command[0]}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return done.stdout

    def codex(self, task: str, *options: str, model: str = "cllm") -> str:
        """Return the last message of the Codex CLI."""
        provider = f'{{name="cllm", base_url="{self.url}/v1", wire_api="responses"}}'
        server = f'{{command="{sys.executable}", args=["{SERVER}"]}}'
        settings = {
            "model_provider": "cllm", "model_providers.cllm": provider, "mcp_servers.pictures": server,
            "check_for_update_on_startup": "false", "analytics.enabled": "false",
        }  # fmt: skip
        given = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        (self.home / "codex").mkdir(exist_ok=True)
        ways = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", model]
        command = ["codex", "exec", *ways, *given, *options, task]
        return self.run(command, {"CODEX_HOME": str(self.home / "codex")})

    def claude(self, task: str, *options: str) -> str:
        """Return the last message of Claude Code."""
        pictures = {"command": sys.executable, "args": [str(SERVER)]}
        servers = ["--mcp-config", json.dumps({"mcpServers": {"pictures": pictures}})]
        tools = ["--allowedTools", "Bash,Read,mcp__pictures__picture"]
        variables = {
            "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": "none", "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CONFIG_DIR": str(self.home / "claude"), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(self.n_answer_max),
        }  # fmt: skip
        command = ["claude", "-p", task, "--model", "cllm", *servers, *tools, *options]
        return self.run(command, variables)

    def opencode(self, task: str, *options: str, n_ctx: int = N_CTX, status: int = 0) -> str:
        """Return what opencode has said."""
        limits = {"context": n_ctx, "output": self.n_answer_max}
        modalities = {"input": ["text", "image"], "output": ["text"]}
        model = {"name": "cllm", "reasoning": True, "limit": limits, "modalities": modalities}
        provider = {
            "npm": "@ai-sdk/openai-compatible", "models": {"cllm": model},
            "options": {"baseURL": f"{self.url}/v1", "apiKey": "none"},
        }  # fmt: skip
        server = {"type": "local", "command": [sys.executable, str(SERVER)]}
        settings = {
            "autoupdate": False, "share": "disabled", "model": "cllm/cllm", "small_model": "cllm/cllm",
            "provider": {"cllm": provider}, "mcp": {"pictures": server},
        }  # fmt: skip
        (self.home / "opencode.json").write_text(json.dumps(settings))
        variables = {
            "OPENCODE_CONFIG": str(self.home / "opencode.json"), "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
        }  # fmt: skip
        return self.run(["opencode", "run", *options, task], variables, status)


Serve = Callable[..., Agent]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Serve a script, and return an agent that works on it."""
    with ExitStack() as running:

        def start(script: Script, n_ctx: int = N_CTX) -> Agent:
            engine = FakeEngine(script, n_ctx=n_ctx, kv_unified=True)
            return Agent(running.enter_context(served(lambda: engine)), tmp_path / "home")

        yield start


def result_of(script: Script) -> str:
    """The last result of a tool, as the model has read it."""
    return script.prompts[-1].rpartition("\ntool: ")[2]


# --- The Codex CLI ------------------------------------------------------------------------------
def test_codex_runs_a_command_and_reads_what_it_prints(serve: Serve) -> None:
    script = Script(calling("exec_command", cmd="echo fin''ished"))
    assert serve(script).codex(TASK).strip() == DONE
    assert "finished" in result_of(script)


def test_codex_calls_a_tool_of_a_namespace_whose_image_is_seen(serve: Serve) -> None:
    script = Script(calling("mcp__pictures__picture", city="Oslo"))
    assert serve(script).codex(TASK).strip() == DONE
    assert "This is Oslo." in result_of(script)
    assert IMAGE in result_of(script)
    assert PIXEL not in script.prompts[-1]


def test_codex_views_a_picture_and_sends_one_of_its_user(serve: Serve) -> None:
    script = Script()
    agent = serve(script)
    picture = agent.place / "picture.png"
    picture.write_bytes(base64.b64decode(PIXEL))
    script.steps = [calling("view_image", path=str(picture))]
    assert agent.codex(TASK, "--image", str(picture), "--").strip() == DONE
    assert [prompt.count(IMAGE) for prompt in script.prompts] == [1, 2]


def test_codex_applies_a_patch_that_is_the_text_of_a_custom_tool(serve: Serve) -> None:
    patch = '*** Begin Patch\n*** Add File: new.txt\n+It is "new".\n*** End Patch\n'
    script = Script(calling("apply_patch", input=patch))
    agent = serve(script)
    # The model's name says which tools it gets.
    assert agent.codex(TASK, model="gpt-5.5").strip() == DONE
    assert (agent.place / "new.txt").read_text() == 'It is "new".\n'


def test_codex_says_that_the_context_is_full_and_compacts_where_it_knows_its_size(
    serve: Serve,
) -> None:
    script = Script(*[calling("exec_command", cmd=LONG, max_output_tokens=100_000)] * 8)
    agent = serve(script, n_ctx=70_000)
    with pytest.raises(AgentError, match="ran out of room in the model"):
        agent.codex(TASK)
    sizes = ["-c", "model_context_window=70000", "-c", "model_auto_compact_token_limit=55000"]
    agent.codex(TASK, *sizes)
    assert script.has_compacted


@pytest.mark.parametrize("effort", ["low", "high"])
def test_codex_may_wish_an_effort_of_a_model_that_does_not_think(serve: Serve, effort: str) -> None:
    agent = serve(Script())
    assert agent.codex(TASK, "-c", f"model_reasoning_effort={effort}").strip() == DONE


# --- Claude Code --------------------------------------------------------------------------------
def test_claude_code_runs_a_command_and_reads_what_it_prints(serve: Serve) -> None:
    script = Script(calling("Bash", command="echo fin''ished", description="Says so."))
    assert serve(script).claude(TASK).strip() == DONE
    assert "finished" in result_of(script)


def test_claude_code_reads_a_picture_that_is_seen(serve: Serve) -> None:
    script = Script()
    agent = serve(script)
    picture = agent.place / "picture.png"
    picture.write_bytes(base64.b64decode(PIXEL))
    script.steps = [
        calling("Read", file_path=str(picture)),
        calling("mcp__pictures__picture", city="Oslo"),
    ]
    assert agent.claude(TASK).strip() == DONE
    assert "This is Oslo." in result_of(script)
    assert [prompt.count(IMAGE) for prompt in script.prompts] == [0, 1, 2]
    assert PIXEL not in script.prompts[-1]


def test_claude_code_compacts_when_the_context_is_full(serve: Serve) -> None:
    script = Script(*[calling("Bash", command=LONG, description="Writes a lot.")] * 6)
    # Its instructions with the tools have 49,000 bytes, and each result 2,400.
    assert serve(script, n_ctx=56_000).claude(TASK).strip() == DONE
    assert script.has_compacted


# --- opencode -----------------------------------------------------------------------------------
def test_opencode_runs_a_command_and_reads_what_it_prints(serve: Serve) -> None:
    script = Script(calling("bash", command="echo fin''ished", description="Says so."))
    assert DONE in serve(script).opencode(TASK)
    assert "finished" in result_of(script)


def test_opencode_calls_a_tool_whose_image_is_seen(serve: Serve) -> None:
    script = Script(calling("pictures_picture", city="Oslo"))
    assert DONE in serve(script).opencode(TASK)
    assert "This is Oslo." in result_of(script)
    assert IMAGE in script.prompts[-1]
    assert PIXEL not in script.prompts[-1]


def test_opencode_may_wish_an_effort_of_a_model_that_does_not_think(serve: Serve) -> None:
    assert DONE in serve(Script()).opencode(TASK, "--variant", "high")


def test_opencode_compacts_when_the_context_is_full(serve: Serve) -> None:
    script = Script(*[calling("bash", command=LONG, description="Writes a lot.")] * 6)
    # It goes on, yet its status tells of the request that was too long.
    serve(script, n_ctx=120_000).opencode(TASK, n_ctx=200_000, status=1)
    assert script.has_compacted


# --- A real model -------------------------------------------------------------------------------
@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.skipif(not MODEL.exists(), reason="SmolLM2 is not there: make test-real fetches it")
@pytest.mark.parametrize("name", ["codex", "claude", "opencode"])
def test_a_real_model_answers_each_agent(name: str, tmp_path: Path) -> None:
    # Claude Code's prompt has 12,400 tokens; the Codex CLI names no limit of an answer.
    with served(lambda: Engine(MODEL, n_ctx=14_336, kv_unified=True)) as url:
        agent = Agent(url, tmp_path / "home", n_answer_max=64)
        assert getattr(agent, name)("Say hello.").strip()
