"""The chats of the page: several at once, branches, the list, messages, and what the browser or the server denies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "playwright.sync_api",
    reason="the browser is driven from another environment: make test-clients",
)
from playwright.sync_api import Page, Route, expect

from tests.clients.conftest import say

URL = "**/v1/chat/completions"
PHONE = {"width": 390, "height": 844}


def events(*deltas: dict[str, Any], end: str | None = "stop") -> str:
    """Return the body of an answer of these deltas."""
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": delta, "finish_reason": None} for delta in deltas
    ]
    choices[-1]["finish_reason"] = end
    lines = [f"data: {json.dumps({'id': 'r', 'choices': [choice]})}\n\n" for choice in choices]
    return "".join([*lines, "data: [DONE]\n\n"])


def answers(page: Page, text: str, end: str | None = "stop") -> list[dict[str, Any]]:
    """Let the server answer this text from now on; return the bodies of the requests."""
    asked: list[dict[str, Any]] = []

    def fulfil(route: Route) -> None:
        asked.append(route.request.post_data_json)
        body = events({"content": text}, end=end)
        route.fulfill(headers={"content-type": "text/event-stream"}, body=body)

    page.unroute_all()
    page.route(URL, fulfil)
    return asked


def never_ends(page: Page, text: str, chunk: str = "") -> None:
    """Let the next answer get this text, or a chunk, with each call of `window.more`, and not end unless it is stopped."""
    page.evaluate(
        """text => {
            window.fetch = async (_, { signal } = {}) => new Response(new ReadableStream({
                start: (controller) => {
                    window.more = () => controller.enqueue(new TextEncoder().encode(text));
                    signal?.addEventListener("abort", () => controller.error(signal.reason));
                },
            }));
        }""",
        chunk or events({"content": text}, end=None).partition("data: [DONE]")[0],
    )


def answer_of(page: Page) -> Any:
    return page.locator(".message.assistant").last


# --- Several chats ----------------------------------------------------------------------------------
def test_a_message_that_is_sent_is_shown_wherever_the_reader_is(page: Page, base_url: str) -> None:
    page.goto(base_url)
    for number in range(12):
        say(page, f"question {number}")
        expect(page.locator(".facts")).to_have_count(number + 1)
        expect(page.get_by_role("button", name="Send")).to_be_visible()
    messages = page.locator("#messages")
    messages.evaluate("(box) => { box.scrollTop = 0; }")
    say(page, "the last question")
    expect(page.get_by_text("the last question", exact=True).last).to_be_in_viewport()
    expect(page.locator(".facts")).to_have_count(13)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    # While an answer comes, the reader may stay elsewhere.
    messages.evaluate("(box) => { box.scrollTop = 0; }")
    page.locator("#messages summary").first.click()
    assert messages.evaluate("(box) => box.scrollTop") == 0


def test_several_chats_answer_at_once_with_marks_in_the_list(page: Page, base_url: str) -> None:
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route(URL, hold)
    page.goto(base_url)
    say(page, "the first")
    page.get_by_role("button", name="New chat").click()
    say(page, "the second")
    marks = page.get_by_role("img", name="is being answered")
    expect(marks).to_have_count(2)
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    while len(held) < 2:
        page.evaluate("0")
    for route in held:
        text = route.request.post_data_json["messages"][0]["content"]
        route.fulfill(
            headers={"content-type": "text/event-stream"}, body=events({"content": f"to {text}"})
        )
    expect(answer_of(page)).to_contain_text("to the second")
    expect(marks).to_have_count(0)
    unread = page.get_by_role("img", name="has a new answer")
    expect(unread).to_have_count(1)
    page.get_by_role("button", name="the first", exact=False).first.click()
    expect(answer_of(page)).to_contain_text("to the first")
    expect(unread).to_have_count(0)


def test_a_message_that_is_being_written_waits_in_its_chat(page: Page, base_url: str) -> None:
    page.goto(base_url)
    say(page, "the first")
    expect(page.locator(".facts")).not_to_be_empty()
    page.get_by_label("Message", exact=True).fill("not sent yet")
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    page.locator("#chats button").first.click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("not sent yet")


def test_an_edit_and_results_of_tools_wait_in_their_chat(page: Page, base_url: str) -> None:
    page.goto(base_url)
    call = {"index": 0, "id": "c", "function": {"name": "look", "arguments": "{}"}}
    body = events({"tool_calls": [call]}, end="tool_calls")
    page.route(URL, lambda r: r.fulfill(headers={"content-type": "text/event-stream"}, body=body))
    say(page, "question")
    page.get_by_label("Result of look").fill("a result")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("question, otherwise")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#welcome")).to_be_visible()
    page.locator("#chats button").first.click()
    expect(page.get_by_label("Edited message")).to_have_value("question, otherwise")
    expect(page.get_by_label("Result of look")).to_have_value("a result")
    page.get_by_label("Edited message").press("Escape")
    page.get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Edited message")).to_have_value("question")


def test_a_click_on_the_shown_chat_keeps_it_while_another_is_being_read(
    page: Page, base_url: str
) -> None:
    page.goto(base_url)
    page.evaluate(FILL, [2, 1, "text"])
    page.reload()
    shown = page.locator("#chats button[aria-current]")
    title = shown.text_content()
    page.evaluate(
        """() => {
            document.querySelector("#chats button.open:not([aria-current])").click();
            document.querySelector("#chats button[aria-current]").click();
        }"""
    )
    page.evaluate("import('/page/store.js').then((store) => store.loadAll())")  # after that chat
    assert shown.text_content() == title


# --- Keys -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sign", [{"isComposing": True}, {"keyCode": 229}])
def test_keys_of_an_input_method_send_and_stop_nothing(
    page: Page, base_url: str, sign: dict[str, Any]
) -> None:
    press = """(field, options) => field.dispatchEvent(
        new KeyboardEvent("keydown", { bubbles: true, cancelable: true, ...options }))"""
    page.goto(base_url)
    prompt = page.get_by_label("Message", exact=True)
    prompt.fill("nihao")
    assert prompt.evaluate(press, {"key": "Enter", **sign})  # it is left to the browser
    expect(page.locator("#welcome")).to_be_visible()
    never_ends(page, "more ")
    prompt.press("Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    prompt.evaluate(press, {"key": "Escape", **sign})
    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")  # it clears the search
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    prompt.press("Escape")
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_new_chat_beside_one_that_grows_shows_its_first_view(page: Page, base_url: str) -> None:
    page.goto(base_url)
    never_ends(page, "more ")
    say(page, "Hi")
    page.evaluate("window.more()")
    expect(answer_of(page)).to_contain_text("more")
    page.evaluate("window.more(); document.getElementById('new-chat').click()")
    page.evaluate(
        "new Promise((done) => setTimeout(() => requestAnimationFrame(() => setTimeout(done)), 500))"
    )
    expect(page.locator("#welcome")).to_be_visible()


def test_what_is_typed_into_a_new_chat_waits_there_too(page: Page, base_url: str) -> None:
    page.goto(base_url)
    say(page, "the first")
    expect(page.locator(".facts")).not_to_be_empty()
    page.get_by_role("button", name="New chat").click()
    page.get_by_label("Message", exact=True).fill("a thought")
    page.locator("#chats button").first.click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("a thought")
    page.get_by_role("button", name="37+58=").click()
    expect(page.locator(".message.user .text")).to_have_text("37+58=")
    expect(page.get_by_label("Message", exact=True)).to_have_value("a thought")


def test_two_tabs_add_to_the_same_chat_and_lose_nothing(page: Page, base_url: str) -> None:
    page.goto(base_url)
    say(page, "question 1")
    expect(page.locator(".facts")).not_to_be_empty()
    other = page.context.new_page()
    other.goto(base_url)
    other.get_by_role("button", name="Edit").click()
    say(page, "question 2")
    expect(page.locator(".message")).to_have_count(4)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    other.get_by_label("Edited message").fill("question 1, otherwise")
    other.get_by_label("Edited message").press("Enter")
    expect(other.locator(".message.user").first).to_contain_text("2/2")
    expect(other.locator(".facts")).not_to_be_empty()
    page.reload()
    expect(page.locator(".message.user .text")).to_have_text("question 1, otherwise")
    page.get_by_role("button", name="Earlier version").first.click()
    expect(page.locator(".message.user .text")).to_have_text(["question 1", "question 2"])


# --- Answers side by side ---------------------------------------------------------------------------
def choice(index: int, end: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": end}


def test_answers_side_by_side_are_one_request(page: Page, base_url: str) -> None:
    """Browsers have six connections to a server."""
    call = {"index": 0, "id": "c", "function": {"name": "look", "arguments": "{}"}}
    choices = [
        choice(0, reasoning_content="Hm."), choice(1, content="to"), choice(0, content="one"),
        choice(2, tool_calls=[call]), choice(1, "stop", content="two"), choice(2, "tool_calls"), choice(0, "length"),
    ]  # fmt: skip
    chunks: list[dict[str, Any]] = [{"choices": [each]} for each in choices]
    chunks.append({"choices": [], "usage": {"completion_tokens": 30}})
    asked: list[dict[str, Any]] = []

    def fulfil(route: Route) -> None:
        asked.append(route.request.post_data_json)
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        route.fulfill(headers={"content-type": "text/event-stream"}, body=body)

    page.route(URL, fulfil)
    page.goto(base_url)
    page.get_by_text("Settings").click()
    page.get_by_label("Answers side by side").fill("3")
    say(page, "question")
    one, two, three = (page.locator(".variant").nth(index) for index in range(3))
    expect(one.locator("summary")).to_contain_text("Reasoning")
    expect(one.locator(":scope > p").first).to_have_text("one")
    expect(one.locator(".facts")).to_contain_text("cut: no more tokens")
    expect(two.locator(":scope > p").first).to_have_text("totwo")
    expect(three.get_by_text("Calls look")).to_be_visible()
    expect(three.locator(".facts")).to_contain_text("30 tokens of 3 answers, ")
    assert [body["n"] for body in asked] == [3]


def test_of_answers_side_by_side_those_that_are_complete_stay_so(page: Page, base_url: str) -> None:
    page.goto(base_url)
    page.get_by_text("Settings").click()
    page.get_by_label("Answers side by side").fill("2")
    chunk = {"choices": [choice(0, "stop", content="complete"), choice(1, content="begun")]}
    never_ends(page, "", f"data: {json.dumps(chunk)}\n\n")
    say(page, "question")
    page.evaluate("window.more()")
    expect(page.locator(".variant").nth(1)).to_contain_text("begun")
    page.get_by_label("Message", exact=True).press("Escape")
    expect(page.locator(".facts").nth(1)).to_contain_text("stopped")
    expect(page.locator(".facts").nth(0)).not_to_contain_text("stopped")


# --- Branches ---------------------------------------------------------------------------------------
def test_edits_and_other_answers_are_branches(page: Page, base_url: str) -> None:
    page.goto(base_url)
    answers(page, "answer A")
    say(page, "question 1")
    expect(answer_of(page)).to_contain_text("answer A")
    answers(page, "answer B")
    page.get_by_role("button", name="Regenerate").click()
    expect(answer_of(page)).to_contain_text("answer B")
    expect(answer_of(page)).to_contain_text("2/2")
    asked = answers(page, "answer C")
    say(page, "question 2")
    expect(answer_of(page)).to_contain_text("answer C")
    told = [message["content"] for message in asked[0]["messages"]]
    assert told == ["question 1", "answer B", "question 2"]
    answers(page, "answer D")
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edited message").fill("question 1, otherwise")
    page.get_by_label("Edited message").press("Enter")
    expect(page.locator(".message")).to_have_count(2)
    expect(answer_of(page)).to_contain_text("answer D")
    page.reload()
    page.locator(".message.user").get_by_role("button", name="Earlier version").click()
    expect(page.locator(".message")).to_have_count(4)
    expect(answer_of(page)).to_contain_text("answer C")
    page.locator(".message.assistant").first.get_by_role("button", name="Earlier version").click()
    expect(page.locator(".message")).to_have_count(2)
    expect(answer_of(page)).to_contain_text("answer A")


def test_an_edit_that_is_cancelled_changes_nothing(page: Page, base_url: str) -> None:
    page.goto(base_url)
    answers(page, "answer")
    say(page, "question")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("other")
    page.keyboard.press("Escape")
    expect(page.locator(".message.user .text")).to_have_text("question")
    expect(answer_of(page)).to_contain_text("answer")


# --- The list ---------------------------------------------------------------------------------------
def test_a_deleted_chat_comes_back_with_undo(page: Page, base_url: str) -> None:
    page.goto(base_url)
    answers(page, "kept")
    say(page, "precious")
    expect(answer_of(page)).to_contain_text("kept")
    page.get_by_role("button", name="Delete precious").click()
    expect(page.locator("#chats li")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(answer_of(page)).to_contain_text("kept")
    page.reload()
    expect(page.locator("#chats li")).to_have_count(1)


def test_the_focus_stays_in_the_list_when_a_chat_is_deleted(page: Page, base_url: str) -> None:
    page.goto(base_url)
    page.evaluate(FILL, [3, 1, "text"])
    page.reload()
    expect(page.locator("#chats li")).to_have_count(3)
    page.locator("#chats button.delete").nth(1).focus()
    page.keyboard.press("Enter")
    expect(page.locator("#chats li")).to_have_count(2)
    expect(page.locator("#chats button.delete").nth(1)).to_be_focused()


def test_chats_are_found_by_words_and_renamed(page: Page, base_url: str) -> None:
    page.goto(base_url)
    for question, text in (("one", "about Rivers"), ("two", "about hills")):
        answers(page, text)
        page.get_by_role("button", name="New chat").click()
        say(page, question)
        expect(answer_of(page)).to_contain_text(text)
    expect(page.locator("#chats li")).to_have_count(2)
    page.keyboard.press("Control+k")
    page.keyboard.type("rivers")
    expect(page.locator("#chats li")).to_have_count(1)
    expect(page.locator("#chats li button").first).to_have_text("one")
    page.get_by_label("Search in all chats").fill("nowhere")
    expect(page.get_by_text("No chat has these words.")).to_be_visible()
    page.get_by_label("Search in all chats").fill("")
    page.once("dialog", lambda dialog: dialog.accept("Hills & dales"))
    page.get_by_role("button", name="Rename").click()
    expect(page.locator("#chats li button").first).to_have_text("Hills & dales")
    answers(page, "more")
    say(page, "three")
    expect(page.locator("#chats li button").first).to_have_text("Hills & dales")


def test_chats_are_exported_and_imported(page: Page, base_url: str, tmp_path: Path) -> None:
    page.goto(base_url)
    answers(page, "**bold** answer")
    say(page, "question")
    expect(answer_of(page)).to_contain_text("bold answer")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Markdown").click()
    assert saved.value.suggested_filename == "question.md"
    text = Path(saved.value.path()).read_text(encoding="utf-8")
    assert text == "# question\n\n## You\n\nquestion\n\n## Model\n\n**bold** answer\n"
    with page.expect_download() as saved:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "chats.json"
    saved.value.save_as(file)
    page.get_by_role("button", name="Delete question").click()
    expect(page.locator("#chats li")).to_have_count(0)
    page.get_by_label("File of chats").set_input_files(file)
    expect(page.get_by_role("status")).to_have_text("1 chat is imported.")
    expect(answer_of(page)).to_contain_text("bold answer")
    message = {"id": "a", "parent": "", "role": "user", "content": "x"}
    hostile: list[Any] = [
        [{"title": 3, "messages": []}],
        [{"title": "t", "messages": [{**message, "parent": "a"}]}],
        [{"title": "t", "messages": [{**message, "id": ""}]}],
        [{"title": "t", "messages": [message, {**message, "parent": "a"}]}],
        [{"title": "t", "messages": [{**message, "calls": 3}]}],
        [{"title": "t", "messages": [{**message, "files": [{"kind": "image", "name": "", "url": "http://a"}]}]}],
        [{"title": "t", "messages": [{**message, "role": "system"}]}], [None], 7,
    ]  # fmt: skip
    texts = [json.dumps({"format": "cllm-chats", "chats": chats}) for chats in hostile]
    for wrong in ("{}", "not JSON", *texts):
        file.write_text(wrong, encoding="utf-8")
        page.get_by_label("File of chats").set_input_files(file)
        expect(page.get_by_role("status")).to_contain_text("chats.json: ")
        expect(page.locator("#chats li")).to_have_count(1)


def test_an_answer_without_a_question_is_not_made_again(
    page: Page, base_url: str, tmp_path: Path
) -> None:
    message = {"id": "a", "parent": "", "role": "assistant", "content": "Welcome."}
    chats = [{"title": "t", "messages": [message]}]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps({"format": "cllm-chats", "chats": chats}), encoding="utf-8")
    page.goto(base_url)
    page.get_by_label("File of chats").set_input_files(file)
    expect(answer_of(page)).to_contain_text("Welcome.")
    expect(page.get_by_role("button", name="Regenerate")).to_have_count(0)


def test_chats_of_an_earlier_page_are_taken_over(page: Page, base_url: str) -> None:
    page.goto(f"{base_url}/page/icon.svg")
    picture = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    content = [
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "text", "text": "What is it?"},
    ]
    variants = [{"content": "first"}, {"content": "second", "nTokens": 3, "seconds": 1}]
    old = [
        {"role": "user", "content": content},
        {"role": "assistant", "chosen": 1, "variants": variants},
        {"role": "user", "content": "And now?"},
    ]
    page.evaluate(
        "chats => localStorage.setItem('cllm.chats', JSON.stringify(chats))",
        [{"id": "1-2", "messages": old}],
    )
    page.goto(base_url)
    expect(page.locator("#chats li button").first).to_have_text("What is it?")
    expect(page.locator(".message.user img")).to_have_count(1)
    expect(answer_of(page)).to_contain_text("second")
    expect(answer_of(page)).to_contain_text("2/2")
    asked = answers(page, "done")
    say(page, "Well?")
    expect(answer_of(page)).to_contain_text("done")
    assert asked[0]["messages"][0]["content"] == content


# --- Messages ---------------------------------------------------------------------------------------
def test_texts_are_dropped_into_a_message_and_read(page: Page, base_url: str) -> None:
    page.goto(base_url)
    asked = answers(page, "read")
    file: Any = {
        "name": "notes.md",
        "mimeType": "text/markdown",
        "buffer": b"# Plan\n```\nx\n```\n",
    }
    page.locator("#file-chooser").set_input_files(file)
    expect(page.locator("#files summary")).to_have_text("notes.md")
    say(page, "Sum it up.")
    expect(answer_of(page)).to_contain_text("read")
    [part, text] = asked[0]["messages"][0]["content"]
    assert part["text"] == "notes.md:\n````\n# Plan\n```\nx\n```\n\n````\n"
    assert text["text"] == "Sum it up."
    expect(page.locator(".message.user summary")).to_have_text("notes.md")


SLOW_FILES = """
    const read = Blob.prototype.arrayBuffer;
    const released = new Promise((release) => { window.release = release; });
    Blob.prototype.arrayBuffer = async function () {
        await released;
        return read.call(this);
    };
"""
NOTES: Any = {"name": "notes.md", "mimeType": "text/markdown", "buffer": b"Plan"}


def test_a_message_waits_for_its_files(page: Page, base_url: str) -> None:
    page.add_init_script(SLOW_FILES)
    page.goto(base_url)
    asked = answers(page, "read")
    page.locator("#file-chooser").set_input_files(NOTES)
    say(page, "Sum it up.")
    page.evaluate("window.release()")
    expect(page.locator(".message.user summary")).to_have_text("notes.md")
    expect(answer_of(page)).to_contain_text("read")
    assert [part["type"] for part in asked[0]["messages"][0]["content"]] == ["text", "text"]


def test_a_file_that_is_read_late_waits_in_its_chat(page: Page, base_url: str) -> None:
    page.add_init_script(SLOW_FILES)
    page.goto(base_url)
    answers(page, "answer")
    say(page, "the first")
    expect(answer_of(page)).to_contain_text("answer")
    page.locator("#file-chooser").set_input_files(NOTES)
    page.get_by_role("button", name="New chat").click()
    page.evaluate("window.release()")
    page.locator("#chats button").first.click()
    expect(page.locator("#files summary")).to_have_text("notes.md")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#files li")).to_have_count(0)


CODE = '```python\ndef f(x):\n    return "a"  # b\n```\n\n```nonsense\nplain\n```'


def test_code_is_coloured_and_copied_also_without_a_clipboard_of_scripts(
    page: Page, base_url: str
) -> None:
    """Over plain http from another machine, `navigator.clipboard` is undefined."""
    page.add_init_script(
        "Object.defineProperty(navigator, 'clipboard', { value: undefined });"
        "document.execCommand = (what) => { window.copied = document.activeElement.value; return what === 'copy'; };"
    )
    page.goto(base_url)
    answers(page, CODE)
    say(page, "code")
    block = page.locator(".code").first
    expect(block.locator(".code-keyword")).to_have_text(["def", "return"])
    expect(block.locator(".code-comment")).to_have_text("# b")
    expect(block.locator("pre")).to_have_text('def f(x):\n    return "a"  # b')
    expect(page.locator(".code").nth(1).locator("pre")).to_have_text("plain")
    block.get_by_role("button", name="Copy").click()
    expect(block.get_by_role("button", name="Copied")).to_be_focused()
    assert page.evaluate("window.copied") == 'def f(x):\n    return "a"  # b'


FORMULAS = r"""One $a^2$ costs $5 or $6, \(b_1\) and \$c\$.

$$
\frac{1}{2}
$$

- \[ x
- y \]

| t |
|---|
| $z$ |

Wrong: $\frac{$ and `$code$`."""


def test_formulas_are_drawn_and_what_is_none_stays_text(page: Page, base_url: str) -> None:
    page.goto(base_url)
    answers(page, FORMULAS)
    say(page, "formulas")
    expect(page.locator("math")).to_have_count(4)
    expect(page.locator(".formula.display math")).to_have_count(1)
    expect(page.locator("td math")).to_have_count(1)
    expect(answer_of(page)).to_contain_text("costs $5 or $6")
    expect(answer_of(page)).to_contain_text("and $c$.")
    expect(answer_of(page)).to_contain_text(r"Wrong: $\frac{$ and $code$.")


@pytest.mark.parametrize(
    "latex",
    [
        r"\begin{equation} a \label{prompt} \end{equation}",
        r"x \tag{1}\label{prompt}",
        r"x + \ref{engine}",
    ],
)
def test_a_formula_names_no_part_of_the_page(page: Page, base_url: str, latex: str) -> None:
    page.goto(base_url)
    answers(page, f"$${latex}$$")
    say(page, "formula")
    expect(page.locator("math")).to_have_count(1)
    assert page.locator(".formula [id], .formula [href]").count() == 0
    say(page, "and now?")
    expect(page.locator(".message")).to_have_count(4)


def test_a_library_that_was_not_loaded_is_loaded_later(page: Page, base_url: str) -> None:
    page.goto(base_url)
    answers(page, "$a$")
    page.route("**/page/temml.js", lambda route: route.abort())
    with page.expect_console_message(lambda said: "shown as plain text" in said.text):
        say(page, "formula")
    expect(answer_of(page)).to_contain_text("$a$")
    answers(page, "$b$")  # and the library, from now on
    say(page, "formula")
    expect(page.locator("math")).to_have_count(1)


def test_each_line_has_its_own_direction_and_code_has_that_of_code(
    page: Page, base_url: str
) -> None:
    page.goto(base_url)
    answers(page, "שלום עולם\n\nHello\n\n```\nשלום\n```")
    say(page, "שלום")
    expect(answer_of(page).locator(".code pre")).to_be_visible()
    # Where each text begins in its box: at the right edge, or at the left one.
    sides = page.evaluate(
        """() => ["#messages .text", ".variant > p", ".variant > p + p", ".code pre"].map((selector) => {
            const box = document.querySelector(selector);
            const range = document.createRange();
            range.selectNodeContents(box);
            const [text, edges] = [range.getBoundingClientRect(), box.getBoundingClientRect()];
            return text.left - edges.left > edges.right - text.right ? "right" : "left";
        })"""
    )
    assert sides == ["right", "right", "left", "left"]
    page.get_by_label("Message", exact=True).fill("שלום")
    expect(page.get_by_label("Message", exact=True)).to_have_css("direction", "rtl")


def test_reasoning_is_folded_with_its_time_and_stays_open_while_it_grows(
    page: Page, base_url: str
) -> None:
    page.goto(base_url)
    body = events({"reasoning_content": "Hm."}, {"content": "Yes."})
    page.route(URL, lambda r: r.fulfill(headers={"content-type": "text/event-stream"}, body=body))
    say(page, "Well?")
    expect(answer_of(page).locator("summary")).to_have_text(re.compile(r"^Reasoning, \d+\.\d s$"))
    expect(answer_of(page).locator("details")).not_to_have_attribute("open", "")
    answer_of(page).locator("summary").click()
    page.get_by_role("button", name="Edit").click()
    page.keyboard.press("Escape")
    expect(answer_of(page).locator("details")).to_have_attribute("open", "")


def test_a_call_shows_the_schema_of_its_tool(page: Page, base_url: str) -> None:
    page.goto(base_url)
    page.get_by_text("Settings").click()
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": parameters,
    }
    page.get_by_label("Tools, as OpenAI's").fill(
        json.dumps([{"type": "function", "function": function}])
    )
    say(page, "What is the weather?")
    page.get_by_text("The weather of a city").click()
    expect(page.locator(".results pre")).to_contain_text('"city"')


def test_presets_set_the_sampling(page: Page, base_url: str) -> None:
    page.goto(base_url)
    asked = answers(page, "done")
    page.get_by_text("Settings").click()
    page.get_by_label("Preset").select_option("Precise")
    expect(page.get_by_label("Temperature")).to_have_value("0")
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Temperature").blur()
    expect(page.get_by_label("Preset")).to_have_value("")
    page.once("dialog", lambda dialog: dialog.accept("mine"))
    page.get_by_role("button", name="Save as preset").click()
    page.get_by_label("Preset").select_option("The model's")
    page.reload()
    page.get_by_text("Settings").click()
    page.get_by_label("Preset").select_option("mine")
    say(page, "Go")
    expect(answer_of(page)).to_contain_text("done")
    assert asked[0]["temperature"] == 0.7
    page.get_by_role("button", name="Delete preset").click()
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_label("Preset")).to_have_value("mine")


def test_an_answer_that_was_cut_goes_on(page: Page, served_model: str) -> None:
    page.goto(served_model)
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("5")
    say(page, "count:1..9")
    text = answer_of(page).locator(".variant > p").first
    expect(page.locator(".facts")).to_contain_text("cut: no more tokens")
    expect(text).not_to_contain_text("9")
    page.get_by_label("Most tokens").fill("")
    page.get_by_role("button", name="Continue").click()
    expect(text).to_have_text("1 2 3 4 5 6 7 8 9")
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)
    expect(page.locator(".message")).to_have_count(2)


def test_an_answer_that_a_reload_has_cut_goes_on(page: Page, served_model: str) -> None:
    page.goto(served_model)
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    never_ends(page, "1 2 3")
    say(page, "count:1..9")
    page.evaluate("window.more()")
    text = answer_of(page).locator(".variant > p").first
    expect(text).to_have_text("1 2 3")
    is_kept = """async () => {
        const { loadAll } = await import("/page/store.js");
        return (await loadAll())[0]?.messages[1]?.content === "1 2 3";
    }"""
    while not page.evaluate(is_kept):
        pass  # it is kept from time to time; `wait_for_function` does not wait for promises
    page.reload()
    expect(text).to_have_text("1 2 3")
    expect(page.locator(".facts")).to_contain_text("interrupted")
    with page.expect_request(URL) as asked:
        page.get_by_role("button", name="Continue").click()
    assert asked.value.post_data_json["continue_final_message"] is True
    expect(text).to_have_text("1 2 3 4 5 6 7 8 9")
    expect(page.locator(".message")).to_have_count(2)


def test_an_empty_chat_says_what_the_model_can_do(page: Page, served_model: str) -> None:
    page.goto(served_model)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    expect(page.get_by_text("This is the small model that comes with cllm.")).to_be_visible()
    expect(page.get_by_text("cllm serve -m FILE.gguf")).to_be_visible()
    page.get_by_role("button", name="37+58=").click()
    expect(answer_of(page)).to_contain_text("95")


def test_a_picture_is_asked_for_by_a_chip_of_a_model_that_takes_some(
    page: Page, base_url: str
) -> None:
    page.goto(base_url)
    question = "What do you see in this picture?"
    for typed in ("", "my own question"):
        page.get_by_label("Message", exact=True).fill(typed)
        with page.expect_file_chooser():
            page.get_by_role("button", name=question).click()
        expect(page.get_by_label("Message", exact=True)).to_have_value(typed or question)


# --- The page itself ----------------------------------------------------------------------------------
def test_on_a_phone_the_list_covers_the_chat_and_leaves(page: Page, base_url: str) -> None:
    page.set_viewport_size(PHONE)
    page.goto(base_url)
    expect(page.get_by_role("button", name="New chat")).to_be_hidden()
    say(page, "Hi")
    expect(page.locator(".facts")).not_to_be_empty()
    page.get_by_role("button", name="Chats and settings").click()
    expect(page.get_by_role("button", name="New chat")).to_be_visible()
    page.locator("#chats button").first.click()
    expect(page.get_by_role("button", name="New chat")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_what_is_wider_than_a_phone_can_be_scrolled_to(page: Page, base_url: str) -> None:
    page.set_viewport_size(PHONE)
    page.goto(base_url)
    row = "|" + " a long cell |" * 16
    answers(page, f"{row}\n{'|-' * 16}|\n{row}\n\n$" + "x+" * 200 + "y$")
    say(page, "wide")
    for wide in ("table", ".formula"):
        sizes = page.locator(f".variant {wide}").evaluate("e => [e.scrollWidth, e.clientWidth]")
        assert sizes[0] > sizes[1] > 0
        assert (
            page.locator(f".variant {wide}").evaluate("e => e.getBoundingClientRect().right") < 390
        )


def test_the_focus_stays_where_it_was_when_a_message_is_drawn_again(
    page: Page, base_url: str
) -> None:
    page.goto(base_url)
    say(page, "Hi")
    page.get_by_role("button", name="Regenerate").focus()
    page.keyboard.press("Enter")
    expect(answer_of(page)).to_contain_text("2/2")
    expect(page.get_by_role("log")).to_be_focused()  # while there is no such button
    page.get_by_role("button", name="Earlier version").focus()
    page.keyboard.press("Enter")
    expect(answer_of(page)).to_contain_text("1/2")
    expect(page.get_by_role("log")).to_be_focused()  # there is no earlier one
    page.get_by_role("button", name="Edit").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    expect(page.locator(".message.user .text")).to_have_text("Hi")
    focused = page.evaluate("document.activeElement.closest('#messages') !== null")
    assert focused


def test_keys_of_the_chat_do_nothing_in_the_view_of_the_engine(page: Page, base_url: str) -> None:
    page.goto(base_url)
    page.evaluate("window.fetch = async () => new Response(new ReadableStream())")
    say(page, "Hi")
    page.get_by_role("tab", name="Engine").click()
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Chat").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()


def test_a_wrong_key_is_said_and_asked_for_again(page: Page, base_url: str) -> None:
    def guarded(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer right":
            route.fulfill(
                headers={"content-type": "text/event-stream"}, body=events({"content": "in"})
            )
        else:
            route.fulfill(
                status=401, json={"error": {"message": "the API key is missing or wrong"}}
            )

    page.route(URL, guarded)
    page.goto(base_url)
    say(page, "Hi")
    key, use = page.get_by_role("textbox", name="Key"), page.get_by_role("button", name="Use it")
    expect(page.locator("#key-problem")).to_be_empty()
    key.fill("sk-…")
    use.click()
    expect(page.get_by_text("signs of ASCII")).to_be_visible()
    key.fill("wrong")
    use.click()
    expect(page.get_by_text("The key was not accepted")).to_be_visible()
    key.fill("right")
    use.click()
    expect(answer_of(page)).to_contain_text("in")
    page.evaluate("sessionStorage.clear()")
    say(page, "Again")
    expect(key).to_be_visible()
    page.keyboard.press("Escape")
    expect(answer_of(page)).to_contain_text("This server asks for an API key.")


def test_a_server_that_is_gone_is_said_and_found_again(page: Page, base_url: str) -> None:
    page.goto(base_url)
    expect(page.get_by_role("button", name="Add a picture")).to_be_visible()
    page.route("**/health", lambda route: route.abort())
    page.route(URL, lambda route: route.abort())
    say(page, "Hi")
    expect(answer_of(page)).to_contain_text("The server does not answer.")
    expect(page.get_by_role("status")).to_contain_text("The server does not answer.")
    page.unroute_all()
    expect(page.get_by_role("status")).to_be_empty()
    page.get_by_role("button", name="Regenerate").click()
    expect(answer_of(page)).to_contain_text("Hello!")


def test_a_connection_that_is_silent_for_longer_than_the_keep_alives_is_lost(
    page: Page, base_url: str
) -> None:
    page.clock.install()
    page.goto(base_url)
    expect(page.locator("#model")).not_to_be_empty()
    never_ends(page, "begun")
    say(page, "Hi")
    page.evaluate("window.more()")
    expect(answer_of(page)).to_contain_text("begun")
    page.clock.fast_forward("00:46")
    expect(answer_of(page)).to_contain_text("The connection to the server is lost.")


def test_a_full_browser_is_said_and_the_chat_goes_on(page: Page, base_url: str) -> None:
    page.add_init_script("""
        const { put } = IDBObjectStore.prototype;
        window.isFull = true;
        IDBObjectStore.prototype.put = function (value) {
            if (window.isFull) throw new DOMException("full", "QuotaExceededError");
            return put.call(this, value);
        };
    """)
    page.goto(base_url)
    answers(page, "still here")
    say(page, "Hi")
    expect(answer_of(page)).to_contain_text("still here")
    expect(page.get_by_role("status")).to_contain_text("This browser has no room for more")
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Hi", exact=True).click()
    expect(answer_of(page)).to_contain_text("still here")
    page.evaluate("window.isFull = false")
    say(page, "Again")
    expect(page.get_by_role("status")).to_be_empty()
    page.reload()
    expect(page.locator(".message")).to_have_count(4)


def test_without_a_database_chats_last_as_long_as_the_tab(page: Page, base_url: str) -> None:
    page.add_init_script(
        "IDBFactory.prototype.open = () => { throw new DOMException('no', 'SecurityError'); };"
    )
    page.goto(base_url)
    expect(page.get_by_text("they end with this tab")).to_be_visible()
    answers(page, "an answer")
    say(page, "Hi")
    expect(answer_of(page)).to_contain_text("an answer")
    page.get_by_role("button", name="New chat").click()
    page.locator("#chats button").first.click()
    expect(answer_of(page)).to_contain_text("an answer")


def test_the_licences_of_the_libraries_are_shown(page: Page, base_url: str) -> None:
    page.goto(base_url)
    page.get_by_role("button", name="About").click()
    for library in ("markdown-it", "highlight.js", "Temml"):
        expect(page.locator("#licences")).to_contain_text(library)


# --- Long chats ---------------------------------------------------------------------------------------
FILL = """async ([nChats, nTurns, text]) => {
    const { keepAll } = await import("/page/store.js");
    const { add, newChat } = await import("/page/tree.js");
    const chats = Array.from({ length: nChats }, (_, number) => {
        const chat = newChat();
        let parent = "";
        for (let turn = 0; turn < nTurns; turn++) {
            parent = add(chat, parent, { role: "user", content: `chat ${number}, turn ${turn}` }).id;
            parent = add(chat, parent, { role: "assistant", end: "stop", content: text }).id;
        }
        return chat;
    });
    await keepAll(chats);
}"""
LONG = "A **paragraph** with `code`.\n\n```python\nprint(1)\n```\n\n- a\n- b\n"


def test_of_a_long_chat_only_what_is_near_is_drawn(page: Page, base_url: str) -> None:
    page.goto(base_url)
    page.evaluate(FILL, [1, 500, LONG])
    page.reload()
    expect(page.locator(".message")).to_have_count(1000)
    expect(page.get_by_text("chat 0, turn 499")).to_be_in_viewport()
    assert page.locator(".message .code").count() <= 60
    # The others are there as text, so that the browser finds them.
    expect(page.locator(".message").nth(1)).to_contain_text("A **paragraph**")
    page.locator("#messages").evaluate("box => (box.scrollTop = 0)")
    expect(page.locator(".message").nth(1).locator("strong")).to_have_text("paragraph")


def test_a_long_chat_is_drawn_by_short_tasks_and_what_is_in_view_stays(
    page: Page, base_url: str
) -> None:
    page.goto(base_url)
    page.evaluate(FILL, [1, 500, LONG])
    page.add_init_script("""
        window.added = [];
        addEventListener("DOMContentLoaded", () => new MutationObserver((changes) => {
            const nodes = changes.flatMap((change) => [...change.addedNodes]);
            window.added.push(nodes.filter((node) => node.classList?.contains("message")).length);
        }).observe(document.getElementById("messages"), { childList: true }));
    """)
    page.reload()
    expect(page.locator(".message")).to_have_count(1000)
    assert max(page.evaluate("window.added")) <= 200
    expect(page.get_by_text("chat 0, turn 499")).to_be_in_viewport()
    # More messages than a task draws come while the chat is open.
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".message")).to_have_count(0)
    page.locator("#chats button.open").first.click()
    expect(page.locator(".message")).to_have_count(1000)
    answers(page, "done")
    say(page, "one more")
    expect(page.locator(".message")).to_have_count(1002)


@pytest.mark.parametrize(("width", "focused"), [(1440, "prompt"), (390, "messages")])
def test_the_focus_is_not_lost_with_the_button_that_disappears(
    page: Page, base_url: str, width: int, focused: str
) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.goto(base_url)
    never_ends(page, "some words")
    page.get_by_label("Message", exact=True).fill("Hi")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(f"#{focused}")).to_be_focused()
    page.get_by_role("button", name="Stop").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator(f"#{focused}")).to_be_focused()


def test_an_answer_that_grows_leaves_the_other_messages_alone(page: Page, base_url: str) -> None:
    page.goto(base_url)
    page.evaluate(FILL, [1, 20, LONG])
    page.reload()
    marked = page.locator(".message").nth(37).locator("strong")
    marked.evaluate("part => (part.marked = true)")
    answers(page, "done")
    say(page, "one more")
    expect(answer_of(page)).to_contain_text("done")
    assert marked.evaluate("part => part.marked")
