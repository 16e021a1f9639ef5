"""The page in a real browser: chats, answers side by side, and the engine as it runs."""

from __future__ import annotations

import base64
import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cllm import Audio, Image

pytest.importorskip(
    "playwright.sync_api",
    reason="the browser is driven from another environment: make test-clients",
)
from playwright.sync_api import Page, Route, expect

from tests.clients.conftest import N_STREAMS, say

URL = "**/v1/chat/completions"


def test_an_answer_comes_with_its_thought_folded_and_survives_a_reload(
    page: Page, base_url: str
) -> None:
    page.goto(base_url)
    say(page, "Hi")
    answer = page.locator(".message.assistant")
    expect(answer.locator(".variant > p").first).to_have_text("Hello!")
    thought = answer.locator("details")
    expect(thought.locator("pre")).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.locator("pre")).to_have_text("A greeting.")
    page.reload()
    expect(page.locator(".message.assistant .variant > p").first).to_have_text("Hello!")
    expect(page.locator("#chats li")).to_have_count(1)


def test_calls_are_folded_and_their_results_go_on(page: Page, base_url: str) -> None:
    page.goto(base_url)
    page.get_by_text("Settings").click()
    tool = '[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]'
    page.get_by_label("Tools, as OpenAI's").fill(tool)
    say(page, "What is the weather?")
    expect(page.get_by_text("Calls get_weather")).to_be_visible()
    page.get_by_label("Result of get_weather").fill("20 C")
    page.get_by_role("button", name="Give the results").click()
    expect(page.get_by_text("It is 20 C in Paris.")).to_be_visible()


def test_what_a_model_writes_stays_text(page: Page, base_url: str) -> None:
    page.goto(base_url)
    markup = (
        "**bold** <img src=x onerror=\"document.title='owned'\"> [a](javascript:document.title='owned') "
        "![b](http://elsewhere.example/b.png)\n\n<script>document.title = 'owned'</script>"
    )
    event = httpx.Response(200, json={"choices": [{"index": 0, "delta": {"content": markup}}]}).text

    def fulfil(route: Route) -> None:
        route.fulfill(
            headers={"content-type": "text/event-stream"},
            body=f"data: {event}\n\ndata: [DONE]\n\n",
        )

    page.route("**/v1/chat/completions", fulfil)
    say(page, "markup")
    answer = page.locator(".message.assistant .variant")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer).to_contain_text("<script>document.title = 'owned'</script>")
    expect(answer).to_contain_text("![b](http://elsewhere.example/b.png)")
    assert answer.locator("script, img, a").count() == 0
    assert page.title() == "cllm"


# Pieces that nest or repeat, with which a parser may take long, or exhaust its stack.
PIECES = (
    "- ", "> ", "* ", "1. ", "#", "_a", "*a", "**a", "*a **b ", "`a", "``a", "[a](", "[", "![", "[a]:b\n",
    "<a ", "|a", "| a |\n|-|\n", "~~a", "&amp", "\\", "a\n- ", "  - b\n", "***", "[a][", "<!--", "$a", "<b>",
    "http://a.b/", "\t", "* * *\n", "a  \n", "]", "](", "_a*", "```\n", "~~~\n", ">\n", "- a\n\n  ", "a_b",
)  # fmt: skip


def test_no_text_of_a_model_stops_the_page(page: Page, base_url: str) -> None:
    texts = [piece * n for piece in PIECES for n in (10, 300, 1200, 5000, 20_000)]
    texts += ["\n".join("  " * n + "- a" for n in range(600))]
    page.goto(base_url)
    shown = page.evaluate(
        """async (texts) => {
            const { markdown } = await import("/page/markdown.js");
            return texts.map((text) => {
                const box = document.createElement("div");
                box.append(...markdown(text));
                return box.childNodes.length > 0 || !text.replace(/\\[a\\]:b|\\s/g, "");
            });
        }""",
        texts,
    )
    assert len(shown) >= 200
    assert all(shown)


def answered(page: Page, text: str) -> None:
    """Let the model answer this, whatever it is asked."""
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})
    body = f"data: {chunk}\n\ndata: [DONE]\n\n"
    page.unroute_all()
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(headers={"content-type": "text/event-stream"}, body=body),
    )


@pytest.mark.parametrize("text", ["- " * 1183, ">" * 1875, "_a" * 20_000, "[" * 20_000])
def test_a_chat_with_such_a_text_goes_on_and_opens_again(
    page: Page, base_url: str, text: str
) -> None:
    page.goto(base_url)
    answered(page, text)
    say(page, "Write something.")
    expect(page.locator(".message.assistant")).to_have_count(1)
    expect(page.locator("#send")).to_be_visible()
    answered(page, "- [x] done\n- [ ] **not** yet\n\n| a |\n|--:|\n| b |\n\n3. c")
    say(page, "And now?")
    last = page.locator(".message.assistant .variant").last
    expect(last.locator("strong")).to_have_text("not")
    expect(last).to_contain_text("☑ done")
    expect(last).to_contain_text("☐ not yet")
    expect(last.locator("td")).to_have_text("b")
    expect(last.locator("td")).to_have_css("text-align", "right")
    expect(last.locator("ol")).to_have_attribute("start", "3")
    page.reload()
    expect(page.locator(".message.assistant")).to_have_count(2)


def test_an_answer_can_be_stopped_edited_and_made_again(page: Page, served_model: str) -> None:
    def without_end(route: Route) -> None:
        route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True})

    page.goto(served_model)
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.route(URL, without_end)
    say(page, "count:1..199")
    expect(page.locator(".message.assistant .variant > p").first).to_contain_text("1 2 3")
    page.keyboard.press("Escape")
    expect(page.locator(".facts")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    while any(slot["request_id"] for slot in httpx.get(f"{served_model}/slots", timeout=60).json()):
        pass  # its cells are free again
    page.unroute(URL)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("1+1=")
    page.get_by_label("Edited message").press("Enter")
    asked: Any = {"messages": [{"role": "user", "content": "1+1="}], "temperature": 0, "model": "m"}
    right = httpx.post(f"{served_model}/v1/chat/completions", json=asked, timeout=60).json()
    expect(page.locator(".variant > p").first).to_have_text(
        right["choices"][0]["message"]["content"]
    )
    expect(page.locator(".facts")).to_contain_text("tokens")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".facts")).to_contain_text("tokens")
    expect(page.locator(".message")).to_have_count(2)


def test_answers_stand_side_by_side_and_the_chosen_one_goes_on(
    page: Page, served_model: str
) -> None:
    page.goto(served_model)
    page.get_by_text("Settings").click()
    for label, value in (("Answers side by side", "3"), ("Seed", "1"), ("Most tokens", "8")):
        page.get_by_label(label).fill(value)
    page.get_by_label("Temperature").fill("1.5")
    say(page, "Hello")
    expect(page.locator(".variant")).to_have_count(3)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("button", name="Go on with this one").last.click()
    expect(page.locator(".variant").nth(2)).to_have_class("variant chosen")


@pytest.mark.parametrize(
    ("label", "typed", "said"),
    [
        ("JSON schema", "{", "JSON schema: "),
        ("Temperature", "1e", "Temperature: "),
    ],
)
def test_a_setting_that_cannot_be_read_is_said_and_nothing_is_asked(
    page: Page, base_url: str, label: str, typed: str, said: str
) -> None:
    page.goto(base_url)
    page.get_by_text("Settings").click()
    page.get_by_label(label).press_sequentially(typed)
    say(page, "Hi")
    expect(page.get_by_role("alert")).to_contain_text(said)


def test_two_tabs_keep_each_other_s_chats(page: Page, base_url: str) -> None:
    other = page.context.new_page()
    for tab in (page, other):
        tab.goto(base_url)
    say(page, "Hi")
    expect(page.locator(".facts")).not_to_be_empty()
    expect(other.locator("#chats li")).to_have_count(1)
    other.get_by_role("button", name="New chat").click()
    say(other, "Hi again")
    expect(page.locator("#chats li")).to_have_count(2)


def test_the_engine_is_seen_at_work_and_what_is_shared(page: Page, served_model: str) -> None:
    page.goto(f"{served_model}/#engine")
    prompt = "repeat:" + "the beginning that all of them share " * 8
    stop = threading.Event()

    def ask(number: int) -> None:
        body: Any = {
            "prompt": f"{prompt}{number}",
            "ignore_eos": True,
            "max_tokens": 60,
            "seed": number,
        }
        while not stop.is_set():
            httpx.post(f"{served_model}/generate", json=body, timeout=60)

    with ThreadPoolExecutor(N_STREAMS) as clients:
        try:
            asked = [clients.submit(ask, number) for number in range(N_STREAMS)]
            expect(page.locator("#slots tr")).not_to_have_count(0)
            expect(page.locator("#slots")).to_contain_text("decode")
            shared = page.locator("#lanes:not([aria-label$=' 0 positions are shared'])")
            expect(shared).to_have_count(1)
            expect(page.locator("#ticks")).to_have_attribute(
                "aria-label", re.compile(r"latest \d\d+ ticks")
            )
        finally:
            stop.set()
        for each in asked:
            each.result()
    page.get_by_role("tab", name="Chat").click()
    expect(page.get_by_label("Message", exact=True)).to_be_visible()


def test_a_server_with_a_key_asks_for_it_once(page: Page, served_model: str) -> None:
    """As far as the page goes: its server says 401 until a key comes."""

    def guarded(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer right":
            route.continue_()
        else:
            route.fulfill(
                status=401, json={"error": {"message": "the API key is missing or wrong"}}
            )

    page.route("**/v1/chat/completions", guarded)
    page.goto(served_model)
    say(page, "1+1=")
    page.get_by_role("textbox", name="Key").fill("right")
    page.get_by_role("button", name="Use it").click()
    expect(page.locator(".facts")).to_contain_text("tokens")


def test_a_keyboard_reaches_both_views_and_every_control_has_a_name(
    page: Page, base_url: str
) -> None:
    page.goto(base_url)
    page.get_by_role("tab", name="Chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("heading", name="KV cache")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("heading", name="KV cache")).to_be_hidden()
    page.evaluate("location.hash = '#engine'")  # as an address that is typed
    expect(page.get_by_role("heading", name="KV cache")).to_be_visible()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea, select')]
            .filter((e) => !e.textContent.trim() && !e.getAttribute('aria-label') && !e.labels?.length)
            .map((e) => e.outerHTML)"""
    )
    assert nameless == []


def test_of_several_models_the_one_is_asked_that_was_chosen(page: Page, base_url: str) -> None:
    models: dict[str, Any] = {"status": "ok", "models": {"small": "loaded", "large": "unloaded"}}
    page.route("**/health", lambda route: route.fulfill(json=models))
    page.goto(base_url)
    page.get_by_text("Settings").click()
    page.get_by_label("Model", exact=True).select_option("large")
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, "Hi")
    assert asked.value.post_data_json["model"] == "large"
    expect(page.locator(".facts")).not_to_be_empty()
    page.reload()
    expect(page.locator("#model-name")).to_have_value("large")
    del models["models"]["large"]
    page.reload()
    expect(page.locator("#model-name")).to_have_value("small")


# --- Pictures ---------------------------------------------------------------------------------------
DATA_TRANSFER = """async ([name, type, base64]) => {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], name, { type }));
    return transfer;
}"""


PASTE = """(box, clipboardData) =>
    box.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }))"""


def a_file(page: Page, data: bytes, name: str = "picture.png", kind: str = "image/png") -> Any:
    """A file as the clipboard or the mouse carries it."""
    return page.evaluate_handle(DATA_TRANSFER, [name, kind, base64.b64encode(data).decode()])


def picture(side: int) -> bytes:
    """A PNG file of a red square."""
    url = Image(np.full((side, side, 3), (200, 30, 30), np.uint8)).data_url()
    return base64.b64decode(url.partition(",")[2])


def test_pictures_come_by_button_paste_and_drop_and_are_seen(page: Page, base_url: str) -> None:
    page.goto(base_url)
    small, large = picture(40), picture(3000)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add a picture").click()
    file: Any = {"name": "a.png", "mimeType": "image/png", "buffer": small}
    chooser.value.set_files([file, {**file, "name": "b.png"}])
    waiting = page.get_by_role("list", name="Files of the message").get_by_role("img")
    expect(waiting).to_have_count(2)
    page.locator("#prompt").evaluate(PASTE, a_file(page, small))
    expect(waiting).to_have_count(3)
    page.dispatch_event("#chat", "drop", {"dataTransfer": a_file(page, large)})
    expect(waiting).to_have_count(4)
    for _ in range(2):
        page.get_by_role("button", name="Remove picture 1").click()
    expect(waiting).to_have_count(2)
    say(page, "What is this?")
    expect(page.locator(".message.assistant .variant > p").first).to_have_text("I see 2.")
    expect(waiting).to_have_count(0)
    shown = page.locator(".message.user img")
    expect(shown).to_have_count(2)
    sides = shown.evaluate_all("images => images.map((image) => image.naturalWidth)")
    assert sides == [40, 1536]
    page.reload()
    expect(page.locator(".message.user img")).to_have_count(2)
    page.get_by_role("button", name="Edit").click()
    expect(page.locator(".editor img")).to_have_count(2)
    page.get_by_label("Edited message").fill("")
    page.get_by_label("Edited message").press("Enter")
    expect(page.locator(".message.user").get_by_text("2/2")).to_be_visible()
    expect(page.locator(".message.assistant .variant > p").first).to_have_text("I see 2.")
    expect(page.locator("#chats li button").first).to_have_text("A picture")


@pytest.mark.parametrize(("kinds", "is_text"), [(["plain", "html"], True), (["plain"], False)])
def test_a_text_of_a_table_is_pasted_as_text_beside_its_picture(
    page: Page, base_url: str, kinds: list[str], is_text: bool
) -> None:
    """Excel and Word copy a text with HTML and a picture; Finder copies a file and its name."""
    page.goto(base_url)
    expect(page.get_by_role("button", name="Add a picture")).to_be_visible()
    copied = a_file(page, picture(40))
    copied.evaluate(
        "(data, kinds) => kinds.forEach((kind) => data.items.add('a', `text/${kind}`))", kinds
    )
    assert page.locator("#prompt").evaluate(PASTE, copied) is is_text
    if not is_text:
        expect(page.locator("#files li")).to_have_count(1)


def test_a_file_that_is_dropped_beside_the_chat_does_not_leave_the_page(
    page: Page, base_url: str
) -> None:
    page.goto(base_url)
    dropped = a_file(page, b"text", "a.txt", "text/plain")
    for kind in ("dragover", "drop"):
        is_left_to_the_browser = page.locator("#list").evaluate(
            """(list, [kind, dataTransfer]) =>
                list.dispatchEvent(new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true }))""",
            [kind, dropped],
        )
        assert not is_left_to_the_browser
    expect(page.locator("#files li")).to_have_count(0)


def test_recordings_are_played_and_heard(page: Page, base_url: str) -> None:
    page.goto(base_url)
    expect(page.get_by_role("button", name="Add a picture or recording")).to_be_visible()
    file = Audio(np.zeros(800, np.float32)).file()
    page.dispatch_event("#chat", "drop", {"dataTransfer": a_file(page, file, "a.wav", "audio/wav")})
    waiting = page.get_by_role("list", name="Files of the message").locator("audio")
    expect(waiting).to_have_count(1)
    long = a_file(page, bytes(4 << 20), "long.wav", "audio/wav")
    page.dispatch_event("#chat", "drop", {"dataTransfer": long})
    expect(page.get_by_role("status")).to_contain_text("no recording of at most 3 MB")
    say(page, "")
    expect(page.locator(".message.assistant .variant > p").first).to_have_text("I hear 1.")
    expect(page.locator(".message.user audio")).to_have_count(1)
    expect(page.locator("#chats li button").first).to_have_text("A recording")
    page.reload()
    played = page.locator(".message.user audio")
    expect(played).to_have_count(1)
    # The browser reads the file: 800 samples at 16 kHz.
    played.evaluate(
        "audio => audio.readyState || new Promise((done) => (audio.onloadedmetadata = done))"
    )
    assert played.evaluate("audio => audio.duration") == pytest.approx(0.05)
    page.get_by_role("button", name="Edit").click()
    expect(page.locator(".editor audio")).to_have_count(1)


def test_a_file_that_is_no_picture_is_said(page: Page, base_url: str) -> None:
    page.goto(base_url)
    expect(page.get_by_role("button", name="Add a picture")).to_be_visible()
    page.dispatch_event("#chat", "drop", {"dataTransfer": a_file(page, b"GGUF\xff", "m.gguf", "")})
    expect(page.get_by_role("status")).to_contain_text("m.gguf is no text of at most 1 MB")
    broken = a_file(page, b"GGUF", "a.png")
    page.dispatch_event("#chat", "drop", {"dataTransfer": broken})
    expect(page.get_by_role("status")).to_contain_text("a.png is no picture that this browser")
    expect(page.locator("#files li")).to_have_count(0)


def test_what_the_page_says_of_an_action_ends_by_itself(page: Page, base_url: str) -> None:
    page.clock.install()
    page.goto(base_url)
    expect(page.get_by_role("button", name="Add a picture")).to_be_visible()
    page.dispatch_event("#chat", "drop", {"dataTransfer": a_file(page, b"GGUF\xff", "m.gguf", "")})
    expect(page.get_by_role("status")).to_contain_text("m.gguf is no text")
    page.clock.fast_forward("00:11")
    expect(page.get_by_role("status")).to_be_empty()


def test_pictures_are_not_offered_for_a_model_that_takes_none(
    page: Page, served_model: str
) -> None:
    page.goto(served_model)
    expect(page.locator("#model")).to_have_text("cllm-tiny")
    expect(page.get_by_role("button", name="Add a text", exact=True)).to_be_visible()
    page.dispatch_event("#chat", "drop", {"dataTransfer": a_file(page, picture(40))})
    expect(page.get_by_role("status")).to_have_text(
        "picture.png is a picture, and this model takes none."
    )


def test_a_page_that_is_opened_early_waits_for_the_model(page: Page, base_url: str) -> None:
    told: list[dict[str, Any]] = [
        {"status": 502, "body": "<html>", "content_type": "text/html"},  # of a proxy
    ]

    def fulfil(route: Route) -> None:
        if told:
            route.fulfill(**told[0])
        else:
            route.continue_()

    page.route("**/health", fulfil)
    page.goto(base_url)
    expect(page.get_by_role("status")).to_have_text("502 Bad Gateway")
    starting = {"status": "starting", "reason": "the model is being loaded"}
    told[0] = {"status": 503, "json": starting}
    expect(page.get_by_role("status")).to_have_text("the model is being loaded")
    told.clear()
    expect(page.get_by_role("button", name="Add a picture")).to_be_visible()
    expect(page.get_by_role("status")).to_have_text("")


def test_the_view_of_the_engine_shows_images(page: Page, base_url: str) -> None:
    page.goto(base_url)
    expect(page.get_by_role("button", name="Add a picture")).to_be_visible()
    page.dispatch_event("#chat", "drop", {"dataTransfer": a_file(page, picture(300))})
    expect(page.locator("#files li")).to_have_count(1)
    say(page, "What is this?")
    expect(page.locator(".facts")).not_to_be_empty()
    page.get_by_role("tab", name="Engine").click()
    # The prefix that the prefix cache keeps.
    expect(page.locator("#lanes")).to_have_attribute(
        "aria-label", re.compile(r"; [1-9]\d* rows of media$")
    )


# --- Accessibility ----------------------------------------------------------------------------------
AXE = Path(sys.prefix) / "agents/node_modules/axe-core/axe.min.js"
VIEWS = ["empty", "chat", "settings", "engine", "models", "about"]


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed: node, make test-clients")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_nothing_in_any_view(
    browser: Any, base_url: str, width: int, scheme: str
) -> None:
    context = browser.new_context(
        bypass_csp=True, color_scheme=scheme, viewport={"width": width, "height": 844}
    )
    page = context.new_page()
    found = {}
    for view in VIEWS:
        page.goto(f"{base_url}/#engine" if view == "engine" else base_url)
        page.reload()
        if view == "chat":
            say(page, "Hi")
            expect(page.locator(".facts")).not_to_be_empty()
            page.locator(".message summary").first.click()
        if view in ("settings", "models"):
            if width < 720:
                page.get_by_role("button", name="Chats and settings").click()
            page.get_by_text("Settings", exact=True).click()
        if view == "engine":
            expect(page.locator("#numbers div")).not_to_have_count(0)
        if view == "models":
            page.get_by_role("button", name="Models …").click()
            expect(page.get_by_role("dialog").get_by_role("listitem")).not_to_have_count(0)
        if view == "about":
            page.get_by_role("button", name="About").click()
            expect(page.locator("#licences")).to_contain_text("MIT")
        page.evaluate(AXE.read_text(encoding="utf-8"))
        violations = page.evaluate("axe.run().then((result) => result.violations)")
        found[view] = [(each["id"], each["nodes"][0]["html"]) for each in violations]
    context.close()
    assert found == {view: [] for view in VIEWS}
