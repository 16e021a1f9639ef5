"""Chats of the page in several tabs, and in a browser whose storage is denied, damaged, late or closed."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip(
    "playwright.sync_api",
    reason="the browser is driven from another environment: make test-clients",
)
from playwright.sync_api import Page, expect

from tests.clients.conftest import say
from tests.clients.test_page_chats import URL, answer_of, answers, events, never_ends

STORED = """async () => {
    const { loadAll } = await import("/page/store.js");
    const [chat] = await loadAll();
    return chat?.messages.find(({ role }) => role === "assistant");
}"""


# --- Tabs -------------------------------------------------------------------------------------------
def test_an_answer_that_is_continued_loses_its_error_in_the_store_and_in_other_tabs(
    page: Page, base_url: str
) -> None:
    page.goto(base_url)
    error = f"data: {json.dumps({'error': {'message': 'the engine has failed'}})}\n\n"
    body = events({"content": "begun"}, end=None).partition("data: [DONE]")[0] + error
    page.route(URL, lambda r: r.fulfill(headers={"content-type": "text/event-stream"}, body=body))
    say(page, "Hi")
    expect(page.get_by_role("alert")).to_have_text("the engine has failed")
    other = page.context.new_page()
    other.goto(base_url)
    expect(other.get_by_role("alert")).to_have_text("the engine has failed")
    never_ends(page, ", more")
    page.get_by_role("button", name="Continue").click()
    page.evaluate("window.more()")
    while (stored := page.evaluate(STORED))["content"] != "begun, more":
        pass  # it is kept from time to time
    assert "error" not in stored
    assert "end" not in stored
    for tab in (page, other):
        expect(answer_of(tab)).to_contain_text("begun, more")
        expect(tab.get_by_role("alert")).to_have_count(0)
        expect(tab.locator(".facts")).not_to_contain_text("interrupted")


def test_an_answer_that_another_tab_writes_is_not_interrupted_until_that_tab_is_silent(
    page: Page, base_url: str
) -> None:
    page.goto(base_url)
    page.evaluate(
        """async () => {
            const { keep } = await import("/page/store.js");
            const { add, newChat } = await import("/page/tree.js");
            const chat = newChat();
            const { id } = add(chat, "", { role: "user", content: "question" });
            const answer = add(chat, id, { role: "assistant", content: "begun" });
            await keep(chat);
            const tell = () => new BroadcastChannel("cllm.chats").postMessage({ id: chat.id, writing: [answer.id] });
            window.telling = setInterval(tell, 100);
        }"""
    )
    other = page.context.new_page()
    other.goto(base_url)
    expect(other.locator(".facts")).not_to_contain_text("interrupted")
    expect(other.get_by_role("button", name="Continue")).to_have_count(0)
    page.evaluate("clearInterval(window.telling)")
    expect(other.locator(".facts")).to_contain_text("interrupted")
    expect(other.get_by_role("button", name="Continue")).to_be_visible()


def test_a_chat_that_another_tab_deletes_ends_and_comes_back_with_undo_alone(
    page: Page, base_url: str
) -> None:
    page.goto(base_url)
    never_ends(page, "more")
    say(page, "Hi")
    page.evaluate("window.more()")
    other = page.context.new_page()
    other.goto(base_url)
    other.get_by_role("button", name="Delete Hi").click()
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("#chats li")).to_have_count(0)
    assert page.evaluate(STORED) is None
    other.get_by_role("button", name="Undo").click()
    expect(page.locator("#chats li")).to_have_count(1)
    page.locator("#chats button").first.click()
    expect(page.locator(".message")).to_have_count(2)


# --- Storage ----------------------------------------------------------------------------------------
DENIED = """
    const deny = () => { throw new DOMException("denied", "SecurityError"); };
    for (const name of ["localStorage", "sessionStorage"]) Object.defineProperty(window, name, { get: deny });
    IDBFactory.prototype.open = deny;
    window.BroadcastChannel = class { constructor() { deny(); } };
"""


def test_a_browser_that_denies_all_storage_keeps_values_as_long_as_the_page(
    page: Page, base_url: str
) -> None:
    def fulfil(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer right":
            body = events({"content": "an answer"})
            route.fulfill(headers={"content-type": "text/event-stream"}, body=body)
        else:
            route.fulfill(status=401, json={"error": {"message": "the API key is wrong"}})

    page.add_init_script(DENIED)
    page.route(URL, fulfil)
    page.goto(base_url)
    expect(page.get_by_text("they end with this tab")).to_be_visible()
    page.get_by_text("Settings").click()
    page.get_by_label("Preset").select_option("Precise")
    say(page, "Hi")
    page.get_by_role("textbox", name="Key").fill("right")
    page.get_by_role("button", name="Use it").click()
    expect(answer_of(page)).to_contain_text("an answer")
    say(page, "Again")
    expect(page.locator(".facts")).to_have_count(2)


@pytest.mark.parametrize("presets", ['{"a": null}', '{"a": 7}', "[null]", "7", "{"])
def test_presets_that_are_none_are_left_out(page: Page, base_url: str, presets: str) -> None:
    page.goto(f"{base_url}/page/icon.svg")
    page.evaluate("presets => localStorage.setItem('cllm.presets', presets)", presets)
    page.goto(base_url)
    answers(page, "an answer")
    say(page, "Hi")
    expect(answer_of(page)).to_contain_text("an answer")
    page.get_by_text("Settings").click()
    options = page.get_by_label("Preset").get_by_role("option")
    expect(options).to_have_text(["The model's", "Precise", "Varied"])


@pytest.mark.parametrize("damage", ["no stores", "unreadable"])
def test_with_a_damaged_database_chats_last_as_long_as_the_tab(
    page: Page, base_url: str, damage: str
) -> None:
    if damage == "no stores":
        page.goto(f"{base_url}/page/icon.svg")
        page.evaluate(
            """() => new Promise((done) => {
                const request = indexedDB.open("cllm", 1);
                request.onsuccess = () => done(request.result.close());
            })"""
        )
    else:
        page.add_init_script(
            "IDBObjectStore.prototype.getAll = () => { throw new DOMException('no', 'DataError'); };"
        )
    page.goto(base_url)
    expect(page.get_by_text("they end with this tab")).to_be_visible()
    answers(page, "an answer")
    say(page, "Hi")
    expect(answer_of(page)).to_contain_text("an answer")
    expect(page.locator("#chats li")).to_have_count(1)


LATE = """
    const { open } = IDBFactory.prototype;
    IDBFactory.prototype.open = function (...asked) {
        const request = {};
        window.openNow = () => {
            const opening = open.apply(this, asked);
            opening.onsuccess = () => {
                request.result = opening.result;
                request.onsuccess();
            };
        };
        return request;
    };
"""


def test_a_message_that_is_sent_before_the_database_is_open_stays(
    page: Page, base_url: str
) -> None:
    page.goto(base_url)
    answers(page, "an answer")
    say(page, "earlier")
    expect(answer_of(page)).to_contain_text("an answer")
    page.add_init_script(LATE)
    page.reload()
    say(page, "Hi")
    expect(page.locator(".message.user .text")).to_have_text("Hi")
    page.evaluate("window.openNow()")
    expect(page.locator("#chats button.open")).to_have_text(["Hi", "earlier"])
    expect(page.locator(".message.user .text")).to_have_text("Hi")
    expect(answer_of(page)).to_contain_text("an answer")


def test_a_database_that_the_browser_closes_is_opened_again(page: Page, base_url: str) -> None:
    page.add_init_script("""
        const { open } = IDBFactory.prototype;
        IDBFactory.prototype.open = function (...asked) {
            const request = open.apply(this, asked);
            request.addEventListener("success", () => { window.connection = request.result; });
            return request;
        };
    """)
    page.goto(base_url)
    answers(page, "an answer")
    say(page, "Hi")
    expect(page.locator(".facts")).to_have_count(1)
    page.evaluate("connection.close(); connection.dispatchEvent(new Event('close'))")
    say(page, "Again")
    expect(page.locator(".facts")).to_have_count(2)
    expect(page.get_by_role("status")).to_be_empty()
    page.reload()
    expect(page.locator(".message")).to_have_count(4)
