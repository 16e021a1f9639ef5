"""`cllm generate`: outputs in order, whatever order they end in, and streams that behave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from PIL import Image as Pillow

from cllm import Engine, EngineConfig, SamplingParams, TokenDelta, TokenStream
from cllm.cli import generate as generate_module
from cllm.cli.generate import Form, PromptRun
from cllm.cli.habits import as_spelt_here, hint_for_model
from cllm.cli.options import EngineFlags, SamplingFlags
from cllm.cli.terminal import InputLine, StandardOutput
from cllm.cli.texts import visible
from tests.cli.children import CLLM, CTRL_C, ENDLESS, ROOT, Terminal, run_cllm, start_cllm
from tests.conftest import QUIET, submitted_together
from tools import make_model, make_projector
from tools.make_projector import PROJECTORS

GREEDY = ("--temperature", "0")
PLAIN = Form(as_chat=False, as_json=False, has_headings=False, has_progress_bar=False)
FIVE = "5 6 7 8"


# --- What is printed -------------------------------------------------------------------------
def test_one_prompt_prints_its_output_and_nothing_else() -> None:
    done = run_cllm("generate", "repeat:你好 🙂", *GREEDY)
    assert (done.returncode, done.stdout, done.stderr) == (0, "你好 🙂\n", "")


@pytest.mark.parametrize("form", [(), ("--chat", "--chat-template", "{{ messages[0].content }}")])
def test_images_stand_before_each_prompt(form: tuple[str, ...], tmp_path: Path) -> None:
    model = make_model.ensure(PROJECTORS["qwen2vl"].text_model)
    mmproj = make_projector.ensure("qwen2vl")
    files = [tmp_path / f"{n}.png" for n in range(2)]
    for n, file in enumerate(files):
        Pillow.fromarray(np.full((64, 64, 3), 80 * n, np.uint8)).save(file)
    options = ["-m", str(model), "--mmproj", str(mmproj), "-c", "512", "-n", "4", "--json", *form]
    images = [argument for file in files for argument in ("--image", str(file))]
    done = run_cllm("generate", *options, *images, "a", "b", *GREEDY)
    assert done.returncode == 0, done.stderr
    usages = [json.loads(line)["usage"] for line in done.stdout.splitlines()]
    assert [usage["n_image_tokens"] for usage in usages] == [32, 32]
    none = run_cllm("generate", *options, "--image", str(tmp_path / "none.png"), "a", *GREEDY)
    assert (none.returncode, "a file that can be read" in none.stderr) == (1, True)


@pytest.mark.parametrize(
    ("constraint", "name"),
    [
        (("--json-schema", '{"type": "string", "minLength": 99}'), "json_schema"),
        (("--regex", "[a-z]{99}"), "regex"),
        (("--grammar", "root ::= [a-z] [a-z] root | [.]"), "grammar"),
        (("--lark", "start: /[a-z]{99}/"), "lark"),
    ],
)
def test_a_constrained_output_that_was_cut_is_an_error(
    constraint: tuple[str, str], name: str
) -> None:
    done = run_cllm("generate", *constraint, "-n", "5", "one", "two", *GREEDY)
    assert done.returncode == 1
    assert done.stdout.count("\n") == 2
    assert done.stderr == "".join(
        f"cllm: prompt {number}: the output ends after 5 tokens (--max-tokens) and is no whole {name}\n"
        for number in (1, 2)
    )


def test_a_constrained_output_that_is_whole_and_a_free_one_that_was_cut_are_none() -> None:
    for options in (("--regex", "[a-z]{5}"), ("-n", "2")):
        done = run_cllm("generate", *options, "count:1..9", *GREEDY)
        assert (done.returncode, done.stderr) == (0, "")


def test_outputs_come_in_the_order_of_the_prompts_not_of_their_ends() -> None:
    done = run_cllm("generate", "count:1..60", "1+1=", "reverse:streams", *GREEDY)
    numbers = " ".join(map(str, range(1, 61)))
    assert done.stdout == f"{numbers}\n2\nsmaerts\n"
    assert done.stderr == ""


def test_standard_input_has_one_prompt_a_line_among_other_prompts() -> None:
    done = run_cllm("generate", "1+1=", "-", "5+5=", *GREEDY, input="2+2=\r\n\n3+3=\n4+4=")
    assert done.stdout.split() == ["2", "4", "6", "8", "10"]


def test_a_line_is_answered_before_the_next_one_comes() -> None:
    with start_cllm("generate", "-", *GREEDY, stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for n in range(1, 4):
            child.stdin.write(f"{n}+{n}=\n".encode())
            assert child.stdout.readline() == f"{n + n}\n".encode()
        child.stdin.close()
        assert child.wait() == 0


def test_a_file_of_prompts_gives_an_output_for_each(tmp_path: Path) -> None:
    pairs = [(a, b) for a in range(20) for b in range(20)]
    path = tmp_path / "prompts"
    path.write_text("".join(f"{a}+{b}=\n" for a, b in pairs))
    with path.open() as prompts, start_cllm("generate", "-", *GREEDY, stdin=prompts) as child:
        out, err = child.communicate()
    assert [int(line) for line in out.split()] == [a + b for a, b in pairs]
    assert err == b""


def test_json_has_a_line_for_each_prompt_with_all_there_is_to_know() -> None:
    done = run_cllm("generate", "count:1..30", "1+1=", "--json", *GREEDY)
    first, second = map(json.loads, done.stdout.splitlines())
    assert (first["index"], first["prompt"]) == (0, "count:1..30")
    assert set(second) == {
        "index", "prompt", "text", "finish_reason", "stop_reason", "usage", "timings",
    }  # fmt: skip
    assert (second["index"], second["text"], second["finish_reason"]) == (1, "2", "stop")
    assert set(second["usage"]) == {
        "n_prompt", "n_cached", "n_output", "n_reasoning", "n_drafted", "n_accepted",
        "n_image_tokens", "n_audio_tokens",
    }  # fmt: skip
    assert (second["usage"]["n_prompt"], second["usage"]["n_output"]) == (5, 2)
    assert second["timings"]["ttft_s"] > 0


def test_chat_puts_each_prompt_into_the_template_as_a_message() -> None:
    done = run_cllm("generate", "--chat", "--json", "1+1=", "2+2=", *GREEDY)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["text"] for line in lines] == ["2", "4"]
    assert all(line["usage"]["n_prompt"] > len("1+1=") + 10 for line in lines)


@pytest.mark.full
def test_constraints_are_given_as_text_or_as_files(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text('{"type": "object", "additionalProperties": false}')
    grammar.write_text('root ::= "yes" | "no"')
    asked = ("generate", "1+1=", *GREEDY)
    assert run_cllm(*asked, "--json-schema", f"@{schema}").stdout.split() in (["{}"], ["{", "}"])
    assert run_cllm(*asked, "--grammar", f"@{grammar}").stdout in ("yes\n", "no\n")
    assert run_cllm(*asked, "--regex", "[a-c]{3}").stdout.strip("abc") == "\n"
    assert run_cllm("generate", "count:1..9", *GREEDY, "--stop", " 4").stdout == "1 2 3\n"


# --- What goes wrong -------------------------------------------------------------------------
def test_a_request_that_fails_is_a_line_on_stderr_and_the_others_go_on() -> None:
    done = run_cllm("generate", "-", *GREEDY, input=b"1+1=\nbroken \xff\n2+2=\n")
    assert (done.returncode, done.stdout) == (1, "2\n4\n")
    wrong = "line 2 of standard input is b'\\xff', must be UTF-8"
    assert done.stderr == f"cllm: prompt 2: {wrong}\n"


def test_a_prompt_that_is_not_utf_8_is_named() -> None:
    done = run_cllm("generate", b"broken \xff", *GREEDY)
    assert done.stderr == "cllm: prompt 1: prompt is b'\\xff', must be UTF-8\n"


def test_standard_input_comes_before_each_prompt() -> None:
    done = run_cllm("generate", "--json", "a", "b", *GREEDY, "-n", "1", input="one\r\ntwo\n\n")
    prompts = [json.loads(line)["prompt"] for line in done.stdout.splitlines()]
    assert prompts == ["one\ntwo\n\na", "one\ntwo\n\nb"]
    without = run_cllm("generate", "--json", "a", *GREEDY, "-n", "1", input="\n\n")
    assert json.loads(without.stdout)["prompt"] == "a"


def test_standard_input_before_prompts_must_be_utf_8() -> None:
    done = run_cllm("generate", "1+1=", *GREEDY, input=b"one\ntw\xc3o\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "cllm: line 2 of standard input is b'\\xc3', must be UTF-8\n"


def test_a_wait_for_standard_input_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_module, "REMARK_AFTER_S", 0)
    told: list[str] = []
    monkeypatch.setattr(generate_module, "note", told.append)

    async def read_input() -> str:
        await anyio.wait_all_tasks_blocked()
        while not told:
            await anyio.lowlevel.checkpoint()
        return ""

    monkeypatch.setattr(generate_module, "read_input", read_input)
    assert run_cllm("generate", "1+1=", *GREEDY).stdout == "2\n"
    assert "< /dev/null" in told[0]


@pytest.mark.parametrize("value", ["on", "off", "auto"])
@pytest.mark.parametrize("name", ["-fa", "--flash-attn"])
def test_flash_attention_is_switched_as_llama_cpp_switches_it(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLLM_FLASH_ATTN", "")  # restored at the end: `auto` sets it
    assert run_cllm("generate", name, value, "1+1=", *GREEDY).stdout == "2\n"
    assert run_cllm("generate", f"{name}={value}", "1+1=", *GREEDY).stdout == "2\n"


def test_flash_attention_without_a_value_is_on() -> None:
    spelt = partial(as_spelt_here, environment={})
    assert spelt(["generate", "-fa", "on", "x"]) == ["generate", "--flash-attn", "x"]
    assert spelt(["-fa", "x", "-fa", "off"]) == ["--flash-attn", "x", "--no-flash-attn"]
    assert spelt(["x", "-fa"]) == ["x", "--flash-attn"]
    assert spelt(["--flash-attn=auto", "on"]) == ["on"]
    assert spelt(["--", "-fa", "on"]) == ["--", "-fa", "on"]
    assert spelt(["-fa", "on", "-fa"]) == ["--flash-attn", "--flash-attn"]
    assert spelt(["-fa", "", "x"]) == ["--flash-attn", "", "x"]
    assert spelt(["-fa", "0", "-fa=true"]) == ["--no-flash-attn", "--flash-attn"]
    assert run_cllm("generate", "-fa=maybe", "x").returncode == 2


@pytest.mark.parametrize(
    ("command", "name", "hint"),
    [
        *((command, "llama3.2:1b", "hf:USER/REPO:QUANT") for command in ("chat", "generate", "info")),
        ("generate", "user/model-GGUF", "hf:user/model-GGUF:QUANT"),
        ("info", "https://huggingface.co/user/model/resolve/main/a.gguf", "hf:user/model:QUANT"),
        ("generate", "https://other.example/a.gguf", "hf:USER/REPO:QUANT"),
        ("generate", "hf.co/user/model:Q4_K_M", "hf:user/model:QUANT"),
    ],
)  # fmt: skip
def test_a_model_named_as_elsewhere_gets_a_hint(command: str, name: str, hint: str) -> None:
    model = (name,) if command == "info" else ("-m", name)
    done = run_cllm(command, *model, *(("x",) if command == "generate" else ()))
    assert done.returncode == 2
    assert hint in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["./nothing", "/nowhere/model", "nothing.gguf", "..", "", "a" * 300]
)
def test_a_path_of_a_missing_model_gets_no_hint_about_names(name: str) -> None:
    assert hint_for_model(name) == ""


def test_a_request_that_fails_has_its_line_of_json_too() -> None:
    done = run_cllm("generate", "--json", b"broken \xff", "x" * 500, "1+1=", "--n-ctx", "256")
    broken, long, right = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 1
    assert (broken["prompt"], broken["finish_reason"]) == ("broken \udcff", "error")
    assert long["error"].startswith("prompt is too long: 501 tokens > 256 maximum;")
    assert "error" not in right


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PROMPT"),
        (["1+1=", "--temperature", "1000"], "temperature is 1000.0, must be 0 to 100"),
        (["1+1=", "--n-seq-max", "0"], "n_seq_max is 0"),
        (["1+1=", "--json-schema", "@/nowhere"], "'--json-schema': cannot read /nowhere"),
        (["1+1=", "--json-schema", "{"], "json_schema is '{', must be JSON"),
        (["1+1=", "--regex", "a", "--grammar", 'root ::= "a"'], "grammar"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = run_cllm("generate", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.full
def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_1() -> None:
    for option in ("-m", "--model", "--model-path"):
        done = run_cllm("generate", "1+1=", option, "/nowhere.gguf")
        assert done.returncode == 1
        assert done.stderr == "cllm: cannot load '/nowhere.gguf': No such file or directory\n"


def test_a_reader_that_has_enough_ends_it_quietly() -> None:
    with start_cllm("generate", "count:1..9", "1+1=", *ENDLESS) as child:
        assert child.stdout is not None
        child.stdout.read(4)
        child.stdout.close()
        assert child.stderr is not None
        assert child.stderr.read() == b""
        assert child.wait() == 0


def test_standard_output_that_was_closed_before_the_start_ends_it_quietly() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *CLLM, "generate", "1+1="],
        stdin=subprocess.DEVNULL,
        capture_output=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_is_one_line_and_exit_code_1() -> None:
    with Path("/dev/full").open("wb") as full, start_cllm("generate", "1+1=", stdout=full) as child:
        _, err = child.communicate()
    assert child.returncode == 1
    assert b"No space left" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("prompts", [["count:1..900"], ["count:1..900", "-"]])
def test_ctrl_c_ends_it_with_130(prompts: list[str]) -> None:
    with start_cllm("generate", *prompts, *ENDLESS) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(20)
        child.send_signal(signal.SIGINT)
        assert child.stderr.read() == b""
        assert child.wait() == 130


# --- On a terminal ---------------------------------------------------------------------------
def test_on_a_terminal_every_prompt_is_a_heading_and_ctrl_c_leaves_a_new_line() -> None:
    with Terminal("generate", "1+1=", "count:1..900", *GREEDY) as terminal:
        assert terminal.until("2 ▸ count:1..900\r\n") == (
            "1 ▸ 1+1=\r\n2\r\n\r\n2 ▸ count:1..900\r\n"
        )  # fmt: skip
        terminal.exit_code()
    with Terminal("generate", "count:1..9", *ENDLESS) as terminal:
        assert FIVE in terminal.until(FIVE)
        terminal.send(CTRL_C)
        assert terminal.rest().endswith("\r\n")
        assert terminal.exit_code() == 130


@pytest.mark.full
def test_a_progress_bar_is_shown_only_on_a_terminal_and_for_several_prompts() -> None:
    for prompts, is_shown in ((["1+1=", "2+2="], True), (["1+1="], False)):
        master, slave = os.openpty()
        with start_cllm("generate", *prompts, *GREEDY, stderr=slave) as child:
            os.close(slave)
            assert child.stdout is not None
            assert child.stdout.read().split() == [b"2", b"4"][: len(prompts)]
        shown = b""
        try:
            while chunk := os.read(master, 1 << 16):
                shown += chunk
        except OSError:  # the child has ended
            os.close(master)
        assert (b"2/2" in shown) is is_shown


def test_a_terminal_obeys_nothing_that_a_model_says() -> None:
    assert visible("a\x1b[2J\r\x07\x7f\x9b1m\tb\n") == "a␛[2J␍␇��1m\tb\n"


# --- How far it reads ahead ------------------------------------------------------------------
class Recorded(StandardOutput):
    """What would be printed, with a gate before it."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.gate = anyio.Event()

    async def write(self, text: str) -> None:
        await self.gate.wait()
        self.text += text


class Echo:
    """An engine whose output is its prompt, at once."""

    config = EngineConfig(n_seq_max=4)

    def stream(self, prompt: str, params: SamplingParams) -> TokenStream:
        class Stream:
            async def __aenter__(self) -> Any:
                return self

            async def __aexit__(self, *exc: object) -> None:
                pass

            async def __aiter__(self) -> AsyncIterator[TokenDelta]:
                yield TokenDelta(prompt, ())

            async def completion(self) -> None:
                return None

        return cast(TokenStream, Stream())


@pytest.mark.anyio
async def test_prompts_are_read_only_so_far_ahead_of_what_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generate_module, "MAX_AHEAD", 10)
    n_read = 0

    async def prompts() -> AsyncIterator[InputLine]:
        nonlocal n_read
        for n_read in range(1, 201):
            yield InputLine(n_read, f"{n_read}\n")

    out = Recorded()
    generation = PromptRun(cast(Engine, Echo()), SamplingParams(), PLAIN, out)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generation.run, prompts())
        await anyio.wait_all_tasks_blocked()
        # One is being printed, ten wait, and one more has been read that finds no place.
        assert n_read <= 12
        out.gate.set()
    assert out.text.split() == [str(n) for n in range(1, 201)]


@pytest.mark.anyio
async def test_all_prompts_share_their_ticks() -> None:
    async def prompts() -> AsyncIterator[InputLine]:
        for n in range(1, 9):
            yield InputLine(n, f"count:{n}1..{n}9")

    out = Recorded()
    out.gate.set()
    async with Engine(n_ctx=2048, n_seq_max=8, **QUIET) as engine:
        generation = PromptRun(engine, SamplingParams(temperature=0), PLAIN, out)
        with submitted_together(engine, 8):
            assert await generation.run(prompts())
        statistics = engine.statistics()
    assert statistics.n_decoding_rows / statistics.n_decoding_ticks >= 6
    assert out.text.splitlines() == [
        " ".join(str(n) for n in range(10 * i + 1, 10 * i + 10)) for i in range(1, 9)
    ]


# --- Options ---------------------------------------------------------------------------------
def test_what_is_not_given_is_left_to_the_engine() -> None:
    assert SamplingFlags({}).params() == SamplingParams()
    assert EngineFlags({"model": ["m"]}).config() == EngineConfig(model="m", n_ctx="auto")
    assert EngineFlags({"n_ctx": 512}).config() == EngineConfig(n_ctx=512)
    given = EngineFlags({"n_ctx": 512, "n_threads": 3}).config(n_ctx=64, n_seq_max=2)
    assert given == EngineConfig(n_ctx=512, n_seq_max=2, n_threads=3, n_threads_batch=3)
