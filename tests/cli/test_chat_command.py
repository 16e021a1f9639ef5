"""`cllm chat`: it remembers, it stops when told to, and it forgets the oldest when it has to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image as Pillow

from cllm import Audio, Engine, EngineConfig, SamplingParams
from cllm.cli.chat_commands import PARAMETERS, ChatCommands
from cllm.cli.chat_files import last_chat_file, write_chat
from cllm.cli.chat_session import Chat
from cllm.cli.history import History, Messages, Turn
from cllm.cli.options import NO_OPTION, flags_of
from cllm.cli.terminal import StandardOutput
from cllm.settings import settings_of
from tests.cli.children import BACKSPACE, CLLM, CTRL_C, CTRL_D, ENDLESS, ROOT, Terminal, run_cllm
from tests.conftest import QUIET
from tools import make_model, make_projector
from tools.make_projector import PROJECTORS

GREEDY = ("--temperature", "0")
FIVE = "5 6 7 8"


# --- As a script -----------------------------------------------------------------------------
def test_lines_are_messages_and_standard_output_has_the_answers_alone() -> None:
    done = run_cllm("chat", *GREEDY, input="1+1=\n\nrepeat:你好 🙂\n  count:1..5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n你好 🙂\n1 2 3 4 5\n", "")


def test_commands_look_at_the_chat_and_change_it() -> None:
    lines = ("1+1=", "2+2=", "/stats", "/undo", "/stats", "/reset", "/stats", "/undo")
    done = run_cllm("chat", *GREEDY, input="\n".join(lines))
    assert done.stdout == "2\n4\n"
    notes = done.stderr.splitlines()
    assert [note.split(",")[0] for note in notes if "turn" in note] == [
        "2 turns", "1 turn", "0 turns",
    ]  # fmt: skip
    assert "Taken back: 2+2=" in notes
    assert notes[-1] == "There is nothing to undo."


def test_help_names_every_command() -> None:
    done = run_cllm("chat", input="/help")
    named = set(re.findall(r"^/(\w+) ", done.stderr, re.MULTILINE))
    assert named == set(ChatCommands(cast(Any, None))._commands)
    assert done.stdout == ""


def test_a_word_leaves() -> None:
    done = run_cllm("chat", *GREEDY, input="1+1=\n/bye\n2+2=\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")


def test_a_message_can_have_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    lines = ['"""repeat:one', "two", '"""', '"""1+1="""', f"/save {path}"]
    done = run_cllm("chat", *GREEDY, input="\n".join(lines))
    assert done.stdout.endswith("2\n")
    messages = json.loads(path.read_text())["messages"]
    assert [m["content"] for m in messages[::2]] == ["repeat:one\ntwo", "1+1="]


def test_the_last_message_is_answered_once_more_with_other_draws() -> None:
    at_random = ["/set temperature 50", "/set min_p 0", "/set top_p 1", "/set top_k 0"]
    lines = [*at_random, "/set seed 1", "tell me", "/regen", "/stats"]
    done = run_cllm("chat", "--max-tokens", "20", "--ignore-eos", input="\n".join(lines))
    assert "1 turn," in done.stderr
    again = run_cllm("chat", "--max-tokens", "20", "--ignore-eos", input="\n".join(lines))
    assert done.stdout[:8] == again.stdout[:8]
    assert done.stdout != again.stdout
    assert "There is no answer yet." in run_cllm("chat", input="/regen").stderr


def test_what_is_set_holds_for_the_next_answers() -> None:
    lines = [
        "count:1..9",
        "/set max_tokens 3",
        "count:1..9",
        "/set",
        "/set max_tokens null",
        "count:1..9",
    ]
    done = run_cllm("chat", *GREEDY, input="\n".join(lines))
    assert done.stdout == "1 2 3 4 5 6 7 8 9\n1 2\n1 2 3 4 5 6 7 8 9\n"
    assert done.stderr.splitlines() == [
        "max_tokens = 3", "max_tokens = 3", "temperature = 0.0", "max_tokens = None",
    ]  # fmt: skip


def test_files_before_the_next_message_are_dropped_by_clear_and_by_undo(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("count:1..9" + " too long" * 100)
    lines = [f"/file {file}", "/clear", "1+1=", f"/file {file}", "/undo", "2+2=", "/undo"]
    done = run_cllm("chat", *GREEDY, input="\n".join(lines))
    assert done.stdout == "2\n4\n"
    assert "The files before the next message are taken back." in done.stderr
    assert done.stderr.splitlines()[-1] == "Taken back: 2+2="


def test_a_parameter_without_a_value_is_shown() -> None:
    lines = ["/set temp", "/set max_tokens", "/set system Be nice", "/set n_ctx 100"]
    done = run_cllm("chat", *GREEDY, input="\n".join(lines))
    assert done.stderr.splitlines() == [
        "temperature = 0.0", "max_tokens = None", "cllm: system is no parameter: use /system",
        "cllm: there is no parameter n_ctx; Tab after /set has their names",
    ]  # fmt: skip


def test_what_a_command_cannot_do_is_one_line_and_the_chat_goes_on() -> None:
    problems = {
        "/set nope 1": "there is no parameter nope",
        "/set top_p 2": "top_p is 2",
        "/set top_p x": "top_p",
        "/undo it": "/undo takes nothing after it",
        "/file /nowhere/x": "cannot read /nowhere/x: No such file",
        "/load pyproject.toml": "pyproject.toml is no chat",
        "/load": "/load needs the path of a chat",
        "/model llama3.2:1b": "hf:USER/REPO:QUANT",
        "/save /nowhere/x": "cannot write /nowhere/x: No such file",
        "/save /": "cannot write /: ",
        "/clar": "there is no command /clar, did you mean /clear",
        "/set tempp 1": "there is no parameter tempp; did you mean temp",
        "/set json_schema @/nowhere/x": "cannot read /nowhere/x: No such file",
        "/model /nowhere/x": "/nowhere/x",
        "/load ~nosuchuser/x": "/load: ",
        f"/tokens {'x' * (1 << 20)}y": "/tokens: ",
    }
    done = run_cllm("chat", *GREEDY, input="\n".join([*problems, "1+1="]))
    assert (done.returncode, done.stdout) == (0, "2\n")
    for line, problem in zip(done.stderr.splitlines(), problems.values(), strict=True):
        assert line.startswith("cllm: ")
        assert problem in line


def test_a_saved_chat_is_messages_and_goes_on_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    lines = ["/system Count.", "1+1=", "2+2=", f"/save {path}"]
    run_cllm("chat", *GREEDY, input="\n".join(lines))
    messages = json.loads(path.read_text())["messages"]
    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "Count."), ("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4"),
    ]  # fmt: skip
    done = run_cllm("chat", *GREEDY, input=f"/load {path}\n3+3=\n/stats\n/undo\n/undo\n/stats")
    assert done.stdout == "6\n"
    assert re.match(r"2 turns, \d\d+ tokens, the last: 2\+2=\n3 turns, \d\d+ of ", done.stderr), (
        done.stderr
    )
    assert "Taken back: 2+2=" in done.stderr


def test_a_chat_that_ends_with_the_result_of_a_tool_is_loaded_again(tmp_path: Path) -> None:
    """A turn ends so if the model has called tools as often as it may."""
    call = {"id": "call1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call1", "content": "9"},
    ]
    path, again = tmp_path / "chat.json", tmp_path / "again.json"
    path.write_text(json.dumps({"messages": messages}))
    lines = [f"/load {path}", "1+1=", f"/save {again}", "/stats"]
    done = run_cllm("chat", *GREEDY, input="\n".join(lines))
    assert "2 turns," in done.stderr, done.stderr
    assert json.loads(again.read_text())["messages"][:3] == messages


def test_what_is_no_chat_leaves_the_present_one(tmp_path: Path) -> None:
    texts = (
        '{"messages": [{"role": "user", "content": "x"}]}',
        '{"messages": [{"role": "assistant", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": ["x"]}, {"role": "assistant", "content": "x"}]}',
        '{"messages": 3}',
        "[]",
        "x",
    )
    paths = [tmp_path / str(number) for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    loads = [f"/load {path}" for path in paths]
    done = run_cllm("chat", *GREEDY, input="\n".join(["1+1=", *loads, "/stats"]))
    assert done.stderr.count("is no chat: ") == len(texts)
    assert "1 turn," in done.stderr


def test_an_image_goes_before_the_next_message_and_is_saved_as_its_path(tmp_path: Path) -> None:
    model = make_model.ensure(PROJECTORS["qwen2vl"].text_model)
    file, saved = tmp_path / "grey.png", tmp_path / "chat.json"
    Pillow.new("RGB", (64, 64), "grey").save(file)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    options = ["-m", str(model), "--mmproj", str(make_projector.ensure("qwen2vl")), "-c", "512"]
    options += ["-n", "4", "--ignore-eos", "--chat-template", template, *GREEDY]
    again = tmp_path / "again.json"
    lines = [f"/image {file}", "what?", f"/save {saved}", "/reset", f"/load {saved}"]
    lines += ["/image none.png", "/regen", f"/save {again}", "/stats"]
    done = run_cllm("chat", *options, input="\n".join(lines))
    assert done.returncode == 0, done.stderr
    first, *_ = json.loads(saved.read_text())["messages"]
    assert first["content"] == [
        {"type": "image", "image": str(file)},
        {"type": "text", "text": "what?"},
    ]
    assert json.loads(again.read_text())["messages"][0] == first
    assert done.stderr.startswith("grey.png, before the next message.\n")
    assert "cllm: none.png is not a file\n" in done.stderr
    assert "is no chat" not in done.stderr
    for gone in ([], ["--mmproj", str(make_projector.ensure("qwen2vl"))]):
        file.unlink(missing_ok=True)
        lines = ["one", f"/load {saved}", "/stats"]
        options = ["-m", str(model), *gone, "-n", "4", "--chat-template", template, *GREEDY]
        refused = run_cllm("chat", *options, input="\n".join(lines))
        assert refused.returncode == 0
        assert f"cannot continue {saved}: messages[0].content[0] is" in refused.stderr
        assert "1 turn, " in refused.stderr
    refused = run_cllm("chat", input=f"/image {file}")
    assert (
        refused.stderr == "cllm: this model takes no images: give a projector for it as --mmproj\n"
    )


def test_a_recording_goes_before_the_next_message_and_before_each_prompt(tmp_path: Path) -> None:
    file, saved = tmp_path / "a.wav", tmp_path / "chat.json"
    file.write_bytes(Audio(np.zeros(1600, np.float32)).file())
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    options = ["-m", str(make_model.ensure("tiny-llama")), "-c", "512", "-n", "4", *GREEDY]
    options += ["--mmproj", str(make_projector.ensure("ultravox")), "--chat-template", template]
    lines = [
        f"/audio {file}",
        "what?",
        f"/save {saved}",
        "/image a.png",
        "/reset",
        f"/load {saved}",
    ]
    done = run_cllm("chat", *options, input="\n".join(lines))
    assert done.returncode == 0, done.stderr
    first, *_ = json.loads(saved.read_text())["messages"]
    assert first["content"][0] == {"type": "audio", "audio": str(file)}
    assert "cllm: this model takes no images" in done.stderr
    assert "is no chat" not in done.stderr
    done = run_cllm("generate", *options, "--audio", str(file), "--json", "a")
    assert json.loads(done.stdout)["usage"]["n_audio_tokens"] == 50


def test_a_file_goes_before_the_next_message(tmp_path: Path) -> None:
    path, saved = tmp_path / "notes.txt", tmp_path / "chat.json"
    path.write_text("one\ntwo\n")
    lines = [f"/file {path}", "1+1=", "2+2=", f"/save {saved}"]
    done = run_cllm("chat", *GREEDY, input="\n".join(lines))
    assert done.stderr.startswith("8 tokens, before the next message.\n")
    messages = json.loads(saved.read_text())["messages"]
    assert messages[0]["content"] == "notes.txt:\none\ntwo\n\n1+1="
    assert messages[2]["content"] == "2+2="


def test_tokens_are_shown_with_their_text() -> None:
    done = run_cllm("chat", input="/tokens ab\n/tokens")
    assert done.stderr == "2 tokens: 'a':97 'b':98\n0 tokens\n"


def test_a_command_that_does_not_exist_is_said_and_the_chat_goes_on() -> None:
    done = run_cllm("chat", *GREEDY, input="/nope nope\n1+1=")
    assert done.stdout == "2\n"
    assert done.stderr == "cllm: there is no command /nope, see /help\n"


def test_two_slashes_say_one() -> None:
    done = run_cllm("chat", *GREEDY, input="//undo\n/undo")
    assert "Taken back: /undo" in done.stderr


def test_a_message_that_does_not_fit_is_said_and_the_chat_goes_on_as_it_was() -> None:
    long = "repeat:" + "x" * 600
    done = run_cllm("chat", *GREEDY, "--n-ctx", "512", input=f"1+1=\n{long}\n/stats\n2+2=\n")
    assert done.stdout == "2\n4\n"
    assert "tokens > 512 maximum;" in done.stderr
    assert "1 turn," in done.stderr
    assert done.returncode == 1


def test_a_line_that_is_not_utf_8_is_named_and_the_chat_goes_on() -> None:
    done = run_cllm("chat", *GREEDY, input=b"1+1=\nab\xff\xfe\n2+2=\n")
    assert (done.returncode, done.stdout) == (1, "2\n4\n")
    assert done.stderr == "cllm: line 2 of standard input is b'\\xff', must be UTF-8\n"


def test_commands_have_the_names_that_other_programs_give_them() -> None:
    lines = (
        "1+1=",
        "/clear",
        "/reset",
        "/set --temp 0.5",
        "/set parameter top-k 3",
        "/set n 5",
        "/?",
    )
    done = run_cllm("chat", *GREEDY, input="\n".join(lines))
    notes = done.stderr.splitlines()
    assert notes[:5] == [
        "A new chat.",
        "A new chat.",
        "temperature = 0.5",
        "top_k = 3",
        "max_tokens = 5",
    ]
    assert "/clear" in done.stderr


def test_every_sampling_option_of_generate_can_be_set() -> None:
    options = {f"--{name}" for name in PARAMETERS}
    for name, setting in settings_of(SamplingParams).items():
        if setting.flags != NO_OPTION:
            flags = {f"--{flag.lstrip('-')}" for flag in flags_of(name, setting, str)}
            assert flags <= options, name


def test_a_chat_goes_on_with_another_model(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(EngineConfig().model_path.read_bytes().replace(b"cllm-tiny", b"cllm-twin"))
    done = run_cllm("chat", *GREEDY, input=f"1+1=\n/model {other}\n2+2=\n/model\n/stats")
    assert done.stdout == "2\n4\n"
    notes = done.stderr.splitlines()
    assert notes[0].startswith("cllm-twin, ")
    assert notes[1] == "cllm-twin, in use"
    assert "2 turns" in done.stderr


def test_a_model_without_a_template_leaves_the_present_one(tmp_path: Path) -> None:
    path = without_template(tmp_path)
    done = run_cllm("chat", *GREEDY, input=f"/model {path}\n2+2=\n/model")
    assert done.stdout == "4\n"
    assert done.stderr.splitlines()[0] == f"cllm: {path} has no chat template"
    assert "cllm-tiny, in use" in done.stderr


def test_a_message_can_be_changed_in_an_editor_and_is_answered_anew(tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i "s/1+1/3+3/" "$2"\n')
    editor.chmod(0o700)
    lines = ("1+1=", "/edit", "/stats", "/edit", "/undo")
    done = run_cllm("chat", *GREEDY, input="\n".join(lines), EDITOR=f"{editor} --wait", VISUAL="")
    assert done.stdout == "2\n6\n"
    notes = done.stderr.splitlines()
    assert notes[0] == "3+3="
    assert notes[1].startswith("1 turn,")
    assert notes[-2:] == ["Nothing is changed.", "Taken back: 3+3="]


@pytest.mark.parametrize("command", ["/regen", "/edit"])
def test_a_turn_that_gets_no_new_answer_stays(command: str, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    long = "x" * 40_000
    editor.write_text(f'#!/bin/sh\nprintf %s "{long}" > "$1"\n')
    editor.chmod(0o700)
    if command == "/regen":
        lines = ["1+1=", "/set regex (", "/regen", "/set grammar null", "/undo"]
    else:
        lines = ["1+1=", "/edit", "/undo"]
    done = run_cllm("chat", *GREEDY, input="\n".join(lines), EDITOR=str(editor), VISUAL="")
    assert done.stdout == "2\n"
    assert "The last turn is as before." in done.stderr
    assert "Taken back: 1+1=" in done.stderr


def test_an_interrupt_in_the_editor_loses_nothing(tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nkill -INT $PPID\nsed -i "s/1+1/3+3/" "$1"\n')
    editor.chmod(0o700)
    environment = {"EDITOR": str(editor), "VISUAL": "", "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [*CLLM, "chat", *GREEDY], input="1+1=\n/edit\n/stats\n", capture_output=True, text=True,
        cwd=ROOT, env={**os.environ, **environment}, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "2\n6\n"), done.stderr
    assert "1 turn," in done.stderr


def test_an_editor_that_fails_changes_nothing() -> None:
    done = run_cllm(
        "chat", *GREEDY, input="1+1=\n/edit\n/undo", EDITOR="/nowhere/editor", VISUAL=""
    )
    assert "Taken back: 1+1=" in done.stderr
    assert "/nowhere/editor" in done.stderr


def test_a_chat_resumes_with_its_model_and_names_its_last_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    other = tmp_path / "other.gguf"
    other.write_bytes(EngineConfig().model_path.read_bytes().replace(b"cllm-tiny", b"cllm-twin"))
    run_cllm("chat", "-m", str(other), *GREEDY, input="1+1=\n/save")
    done = run_cllm("chat", *GREEDY, "--continue", input="/model\n/undo")
    assert "the last: 1+1=" in done.stderr
    assert "cllm-twin, in use" in done.stderr
    # Its only turn was taken back: there is no chat any more.
    assert "No chat is kept yet" in run_cllm("chat", "--continue", input="").stderr


def test_files_stay_before_the_next_message_if_this_one_gets_no_answer(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("1+")
    lines = [f"/file {file}", "/set regex (", "1=", "/set regex null", "1="]
    done = run_cllm("chat", *GREEDY, input="\n".join(lines))
    assert "The files stay before the next message." in done.stderr
    assert len(done.stdout.splitlines()) >= 1


def test_what_has_no_end_or_is_not_utf_8_is_no_message() -> None:
    done = run_cllm("chat", *GREEDY, input=b'"""repeat:\nx\xff\n"""\n1+1=\n"""2+2=\n')
    assert (done.returncode, done.stdout) == (1, "2\n")
    assert done.stderr.splitlines() == [
        "cllm: line 2 of standard input is b'\\xff', must be UTF-8",
        "cllm: the message from line 5 on has no end",
    ]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    history = history_of(1, 10)
    write_chat(file, history)
    before = file.read_text()
    history.system = "\udcff"
    with pytest.raises(ValueError, match="surrogate"):
        write_chat(file, history)
    assert file.read_text() == before
    assert [*tmp_path.iterdir()] == [file]


def test_no_link_that_stands_where_a_chat_is_written_is_followed_but_its_own(
    tmp_path: Path,
) -> None:
    other, target = tmp_path / "other", tmp_path / "target"
    other.write_text("kept")
    (tmp_path / ".target.new").symlink_to(other)
    (link := tmp_path / "link").symlink_to(target)
    write_chat(link, history_of(1, 10))
    assert other.read_text() == "kept"
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    write_chat(Path(os.devnull), history_of(1, 10))
    assert Path(os.devnull).is_char_device()


def test_the_last_chat_goes_on_and_is_readable_by_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = run_cllm("chat", *GREEDY, "--continue", input="1+1=")
    assert "No chat is kept yet" in first.stderr
    run_cllm("chat", *GREEDY, input="2+2=\n/save")
    for n in (2, 3):
        done = run_cllm("chat", *GREEDY, "--continue", input="3+3=\n/stats")
        assert done.stdout == "6\n"
        assert f"{n} turns, " in done.stderr
    other = run_cllm(
        "chat", *GREEDY, "--continue", "--system", "Count.", input=f"/save {tmp_path}/other"
    )
    assert other.returncode == 0
    assert json.loads((tmp_path / "other").read_text())["messages"][0] == {
        "role": "system",
        "content": "Count.",
    }
    (file,) = (tmp_path / "cllm" / "chats").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_when_the_context_is_full_the_first_turns_are_dropped_and_that_is_said() -> None:
    lines = [f"count:{n}01..{n}10" for n in range(1, 8)]
    done = run_cllm(
        "chat", *GREEDY, "--n-ctx", "256", "--system", "Count.", input="\n".join([*lines, "/stats"])
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        " ".join(str(100 * n + i) for i in range(1, 11)) for n in range(1, 8)
    ]
    notes = done.stderr.splitlines()
    said = [note for note in notes if note.startswith("The context is full: the first ")]
    assert 1 <= len(said) < 5
    n_dropped = sum(int(note.split()[6]) for note in said)
    assert any(note.startswith(f"{7 - n_dropped} turn") for note in notes)


def test_an_answer_that_the_context_cuts_off_says_so() -> None:
    done = run_cllm("chat", *GREEDY, "--n-ctx", "256", input="count:1..200\n1+1=")
    assert "The context is full: the answer ends here." in done.stderr
    assert done.stdout.splitlines()[-1] == "2"


def without_template(directory: Path) -> Path:
    """Return the path of the embedded model without its chat template."""
    key = b"tokenizer.chat_template"
    model = EngineConfig().model_path.read_bytes()
    assert model.count(key) == 1
    path = directory / "model.gguf"
    path.write_bytes(model.replace(key, key.upper()))
    return path


def test_a_model_without_a_template_is_one_line(tmp_path: Path) -> None:
    path = without_template(tmp_path)
    done = run_cllm("chat", "-m", str(path), "--threads", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "cllm: cllm-tiny has no chat template; try cllm generate\n"


@pytest.mark.parametrize("arguments", [["--system", "@/nowhere"], ["--top-p", "2"]])
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    done = run_cllm("chat", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


# --- On a terminal ---------------------------------------------------------------------------
class Typing(Terminal):
    """A terminal with a chat."""

    def until_prompt(self) -> None:
        """Wait until a message can be typed."""
        self.until(self.prompt)

    def leave(self) -> int:
        """Press Ctrl-D at the prompt, and return the exit code."""
        self.until_prompt()
        self.send(CTRL_D)
        return self.exit_code()

    def until_ended(self, press: Callable[[], None]) -> str:
        """Press until the chat has ended, once a prompt: twice within two seconds, however slow the machine."""
        shown = b""
        while True:
            press()
            self._bytes = b""
            while self.prompt.encode() not in self._bytes:
                if not (chunk := self._read()):
                    return (shown + self._bytes).decode()
                self._bytes += chunk
            shown += self._bytes

    prompt = "> "


def typing(*arguments: str, term: str) -> Typing:
    """Return a terminal that answers no questions about its cursor."""
    terminal = Typing(*arguments, environment={"TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1"})
    terminal.prompt = "> " if term == "dumb" else "\x1b[?2004h"
    return terminal


def test_ctrl_c_stops_the_answer_and_keeps_the_chat() -> None:
    with typing("chat", *ENDLESS, term="xterm") as terminal:
        terminal.until_prompt()
        terminal.send("count:1..900\n")
        terminal.until(FIVE)
        terminal.send(CTRL_C)
        terminal.until("stopped: ")
        terminal.until_prompt()
        terminal.send("/stats\n")
        terminal.until("1 turn,")
        terminal.until_prompt()
        terminal.send("count:1..800\n")
        terminal.until(FIVE)
        terminal.send(CTRL_C)
        terminal.until("stopped: ")
        assert terminal.leave() == 0


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_ctrl_c_clears_the_line_and_pressed_again_ends_the_chat_which_is_kept(term: str) -> None:
    with typing("chat", *GREEDY, term=term) as terminal:
        terminal.until_prompt()
        terminal.send("1+1=\n")
        terminal.until("2\r\n")
        terminal.until_prompt()
        terminal.send(f"half a mess{CTRL_C}")
        terminal.until("Ctrl-C again leaves")
        terminal.until_prompt()
        rest = terminal.until_ended(lambda: terminal.send(CTRL_C))
        assert "The chat is kept" in rest
        assert "Traceback" not in rest
        assert terminal.exit_code() == 0
    assert "1 turn," in run_cllm("chat", *GREEDY, "--continue", input="/stats").stderr


def test_a_signal_at_the_prompt_does_what_ctrl_c_does() -> None:
    with typing("chat", term="xterm") as terminal:
        terminal.until_prompt()
        terminal.child.send_signal(signal.SIGINT)
        terminal.until("Ctrl-C again leaves")
        terminal.until_prompt()
        rest = terminal.until_ended(lambda: terminal.child.send_signal(signal.SIGINT))
        assert "Traceback" not in rest
        assert terminal.exit_code() == 0


def test_a_paste_of_several_lines_is_one_message() -> None:
    with typing("chat", *GREEDY, term="xterm") as terminal:
        terminal.until_prompt()
        terminal.send("\x1b[200~repeat:one\ntwo\x1b[201~")
        terminal.send("\n")
        terminal.until("tokens/s")
        terminal.until_prompt()
        terminal.send("/stats\n")
        terminal.until("1 turn,")
        assert terminal.leave() == 0
    (saved,) = [json.loads(path.read_text()) for path in [last_chat_file()] if path is not None]
    assert saved["messages"][0]["content"] == "repeat:one\ntwo"


def test_text_between_three_quotes_is_one_message_on_a_terminal_too() -> None:
    with typing("chat", *GREEDY, term="xterm") as terminal:
        terminal.until_prompt()
        terminal.send('"""repeat:one\ntwo"""\n')
        terminal.until("tokens/s")
        assert terminal.leave() == 0
    path = last_chat_file()
    assert path is not None
    assert json.loads(path.read_text())["messages"][0]["content"] == "repeat:one\ntwo"


def test_tab_completes_commands_and_files_and_names(tmp_path: Path) -> None:
    (tmp_path / "a_long_name.txt").write_text("1 2 3")
    typed = {
        "0 turns": [("/sta", "ts")],
        "before the next message": [("/fi", "le"), (f" {tmp_path}/a_l", "ong_name.txt")],
        "temperature = 0.25": [("/set tempe", "rature"), (" 0.25", "")],
    }
    with typing("chat", *GREEDY, term="xterm") as terminal:
        for found, parts in typed.items():
            terminal.until_prompt()
            for text, completed in parts:
                terminal.send(f"{text}\t" if completed else text)
                terminal.until(completed or text[-1])
            terminal.send("\n")
            terminal.until(found)
        assert terminal.leave() == 0


def test_ctrl_r_finds_a_message_of_an_earlier_session() -> None:
    for typed, answer in (("count:7..9\n", "7 8 9"), ("\x12unt:7\n\n", "7 8 9")):
        with typing("chat", *GREEDY, term="xterm") as terminal:
            terminal.until_prompt()
            terminal.send(typed)
            terminal.until(f"{answer}\r\n")
            assert terminal.leave() == 0


def test_an_answer_on_a_terminal_ends_with_its_pace() -> None:
    with typing("chat", *GREEDY, term="xterm") as terminal:
        terminal.until_prompt()
        terminal.send("count:1..20\n")
        terminal.until("19 20\r\n")
        terminal.until("\x1b[2mcllm-tiny: ")
        assert "tokens/s" in terminal.until("\x1b[0m")
        assert terminal.leave() == 0


def test_backspace_takes_a_whole_character() -> None:
    with typing("chat", *GREEDY, term="xterm") as terminal:
        terminal.until_prompt()
        terminal.send(f"repeat:你好🙂{BACKSPACE}{BACKSPACE}!\n")
        terminal.until("你!\r\n")
        assert terminal.leave() == 0


# --- The partial answer ----------------------------------------------------------------------
class StopsAt(StandardOutput):
    """Stops an answer as soon as a text has been printed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.chat: Chat | None = None
        self.printed = ""
        self._text = text

    async def write(self, text: str) -> None:
        self.printed += text
        if self._text in self.printed and self.chat is not None:
            await self.chat.stop()


@pytest.mark.anyio
async def test_what_there_is_of_a_stopped_answer_stays_in_the_history() -> None:
    out = StopsAt(FIVE)
    async with Engine(n_ctx=2048, n_seq_max=1, **QUIET) as engine:
        chat = Chat(engine, SamplingParams(temperature=0, ignore_eos=True), None, out)
        out.chat = chat
        await chat.answer("count:1..900")
        (turn,) = chat.history.turns
        assert turn.message == "count:1..900"
        (answer,) = turn.said
        assert answer["content"].startswith("1 2 3 4 5 6 7 8")
        assert out.printed == answer["content"] + "\n"
        assert chat.history.messages(chat.history.turns, "next")[1] == answer
        assert answer["role"] == "assistant"
        assert engine.statistics().n_running == 0


# --- What fits -------------------------------------------------------------------------------
def history_of(n_turns: int, n_tokens: int) -> History:
    """Turns of eight characters, in a context of 400 tokens of which an answer may want 100."""
    history = History("system", n_ctx=400)
    for n in range(n_turns):
        said = ({"role": "assistant", "content": f"say{n}"},)
        history.turns.append(Turn(f"ask{n}", said, n_tokens))
    return history


async def count(text: str) -> int:
    """Of these turns, each message and each answer has ten tokens."""
    return 10


async def not_asked(messages: Messages) -> int:
    """To count a whole prompt may be slow."""
    raise AssertionError("it was clear that it fits")


@pytest.mark.anyio
async def test_a_chat_that_fits_is_kept_whole_without_counting_it() -> None:
    history = history_of(20, n_tokens=300 - 10 - 16)
    kept = await history.fitting("next", count=count, count_prompt=not_asked)
    assert kept == history.turns


@pytest.mark.anyio
async def test_the_room_for_an_answer_follows_the_present_limit() -> None:
    async def count_prompt(messages: Messages) -> int:
        return 350

    history = history_of(20, n_tokens=350)
    for n_answer_max, is_whole in ((50, True), (51, False), (10_000, False), (None, False)):
        kept = await history.fitting(
            "n", n_answer_max=n_answer_max, count=count, count_prompt=count_prompt
        )
        assert (kept == history.turns) is is_whole


@pytest.mark.anyio
async def test_a_chat_is_dropped_only_if_it_really_does_not_fit() -> None:
    async def count_prompt(messages: Messages) -> int:
        return 300  # thoughts were left out by the template

    history = history_of(20, n_tokens=390)
    assert await history.fitting("n", count=count, count_prompt=count_prompt) == history.turns


@pytest.mark.anyio
async def test_the_oldest_turns_are_dropped_until_half_of_the_context_is_free() -> None:
    async def count_prompt(messages: Messages) -> int:
        return 400

    history = history_of(20, n_tokens=400)
    kept = await history.fitting("next", count=count, count_prompt=count_prompt)
    assert kept == history.turns[10:]
    messages = history.messages(kept, "next")
    assert messages[0] == {"role": "system", "content": "system"}
    assert [message["content"] for message in messages[1:3]] == ["ask10", "say10"]
    assert messages[-1] == {"role": "user", "content": "next"}
    assert len(history.turns) == 20, "nothing is dropped before it is known to be of use"
    assert history.keep(kept) == 10
    assert history.turns == kept
