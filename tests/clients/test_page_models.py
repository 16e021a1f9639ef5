"""The models of the server on its page: the list, the download of another, and the model that is watched."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip(
    "playwright.sync_api",
    reason="the browser is driven from another environment: make test-clients",
)
from playwright.sync_api import Page, Route, expect

from tests.clients.conftest import say

NAME = "hf:owner/model:Q4_K_M"
MODELS = {"small": "loaded", "large": "unloaded"}
DONE: list[dict[str, Any]] = [
    {"status": "pulling manifest"},
    {"status": f"pulling {NAME}", "total": 2_000_000, "completed": 500_000},
    {"status": "success", "model": NAME},
]


def opened(page: Page, base_url: str) -> Any:
    """Return the dialog of the models."""
    page.goto(base_url)
    if page.viewport_size and page.viewport_size["width"] < 720:
        page.get_by_role("button", name="Chats and settings").click()
    page.get_by_text("Settings", exact=True).click()
    page.get_by_role("button", name="Models …").click()
    return page.get_by_role("dialog", name="Models")


def pulls(page: Page, *lines: dict[str, Any], status: int = 200) -> list[Route]:
    """Let the server answer a download with these lines; return the requests to the admin's routes."""
    asked: list[Route] = []

    def answer(route: Route) -> None:
        asked.append(route)
        if "reload" in route.request.url:
            route.fulfill(json={"model": "model", "seconds": 1.0})
        else:
            body = "".join(json.dumps(line) + "\n" for line in lines)
            route.fulfill(body=body, status=status, content_type="application/x-ndjson")

    page.route(re.compile("/api/pull|/admin/reload"), answer)
    return asked


def download(dialog: Any, name: str = NAME) -> None:
    dialog.get_by_label("Name").fill(name)
    dialog.get_by_label("Admin key of the server").fill("boss")
    dialog.get_by_role("button", name="Download and use it").click()


@pytest.mark.parametrize("width", [390, 1440])
def test_a_model_is_downloaded_with_its_progress_and_then_answers(
    page: Page, base_url: str, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    asked = pulls(page, *DONE)
    dialog = opened(page, base_url)
    expect(dialog.get_by_role("listitem")).to_have_count(1)
    download(dialog)
    expect(dialog.get_by_role("status")).to_have_text(f"{NAME} answers from now on.")
    told = [
        (route.request.url.rpartition("/")[2], route.request.post_data_json,
         route.request.headers["authorization"])
        for route in asked
    ]  # fmt: skip
    assert told == [
        ("pull", {"model": NAME}, "Bearer boss"), ("reload", {"model": NAME}, "Bearer boss"),
    ]  # fmt: skip
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).not_to_be_visible()


def test_the_dialog_shows_the_model_that_answers_now(page: Page, base_url: str) -> None:
    health: dict[str, Any] = {"status": "ok", "model": "first", "modalities": ["text"]}
    page.route("**/health", lambda route: route.fulfill(json=health))
    page.goto(base_url)
    expect(page.locator("#model")).to_have_text("first")
    health |= {"model": "second", "modalities": ["text", "image"]}
    page.get_by_role("button", name="Download another …").click()
    expect(page.locator("#model")).to_have_text("second")
    expect(page.locator("#add-file")).to_have_attribute("aria-label", "Add a picture or text")


def test_the_answer_of_another_model_shows_that_it_is_another(page: Page, base_url: str) -> None:
    health: dict[str, Any] = {"status": "ok", "model": "first"}
    page.route("**/health", lambda route: route.fulfill(json=health))
    page.goto(base_url)
    expect(page.locator("#model")).to_have_text("first")
    health["model"] = "second"
    chunk = {"model": "second", "choices": [{"index": 0, "delta": {"content": "Hello"}}]}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        headers={"content-type": "text/event-stream"}, body=f"data: {json.dumps(chunk)}\n\n"
    ))  # fmt: skip
    say(page, "Hi")
    expect(page.locator("#model")).to_have_text("second")


def test_an_empty_chat_leads_to_the_download(page: Page, base_url: str) -> None:
    page.goto(base_url)
    page.get_by_role("button", name="Download another …").click()
    expect(page.get_by_role("dialog", name="Models")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Models")).not_to_be_visible()
    expect(page.get_by_role("button", name="Download another …")).to_be_focused()


def test_the_progress_is_shown_while_it_lasts(page: Page, base_url: str) -> None:
    page.add_init_script("""
        const fetchOf = window.fetch;
        window.fetch = (...asked) => String(asked[0]).endsWith("api/pull")
            ? new Response(new ReadableStream({ start: (to) => { window.report = (line) =>
                  to.enqueue(new TextEncoder().encode(JSON.stringify(line) + "\\n")); } }))
            : fetchOf(...asked);
    """)
    dialog = opened(page, base_url)
    download(dialog)
    page.wait_for_function("window.report !== undefined")
    page.evaluate("(line) => window.report(line)", DONE[1])
    expect(dialog.get_by_text("0.5 of 2.0 MB")).to_be_visible()
    expect(dialog.get_by_role("status")).to_have_text("Downloading …")
    expect(dialog.get_by_role("progressbar", name="Download")).to_have_js_property("value", 500_000)
    expect(dialog.get_by_role("button", name="Download and use it")).to_be_disabled()


def test_a_download_is_cancelled(page: Page, base_url: str) -> None:
    page.add_init_script("""
        const fetchOf = window.fetch;
        window.fetch = (...asked) => {
            if (!String(asked[0]).endsWith("api/pull")) return fetchOf(...asked);
            const line = (written) => new TextEncoder().encode(JSON.stringify(written) + "\\n");
            if (asked[1].method === "DELETE") {
                window.cancelled = asked[1].headers.authorization;
                window.reports.enqueue(line({ error: "the download was cancelled" }));
                window.reports.close();
                return Promise.resolve(Response.json({ status: "cancelled" }));
            }
            const start = (reports) => { window.reports = reports; };
            return Promise.resolve(new Response(new ReadableStream({ start })));
        };
    """)
    dialog = opened(page, base_url)
    cancel = dialog.get_by_role("button", name="Cancel the download")
    expect(cancel).not_to_be_visible()
    download(dialog)
    page.wait_for_function("window.reports !== undefined")
    cancel.click()
    expect(dialog.get_by_role("status")).to_have_text("the download was cancelled.")
    expect(cancel).not_to_be_visible()
    expect(dialog.get_by_role("button", name="Download and use it")).to_be_enabled()
    assert page.evaluate("window.cancelled") == "Bearer boss"


@pytest.mark.parametrize(
    ("lines", "status", "said"),
    [
        ([{"error": "there is no --admin-key"}], 404, "there is no --admin-key."),
        (
            [DONE[0], {"error": "there is no such repository"}],
            200,
            "there is no such repository.",
        ),
        (
            DONE[:2],
            200,
            "The connection to the server is lost. The download goes on at the server, or continues "
            "where it ended.",
        ),
    ],
)
def test_a_download_that_fails_says_why_and_can_be_tried_again(
    page: Page, base_url: str, lines: list[dict[str, Any]], status: int, said: str
) -> None:
    pulls(page, *lines, status=status)
    dialog = opened(page, base_url)
    download(dialog)
    expect(dialog.get_by_role("status")).to_have_text(said)
    expect(dialog.get_by_role("button", name="Download and use it")).to_be_enabled()


def test_of_several_models_the_downloaded_one_is_chosen(page: Page, base_url: str) -> None:
    models = dict(MODELS)
    page.route("**/health", lambda route: route.fulfill(json={"status": "ok", "models": models}))
    asked = pulls(page, *DONE)
    dialog = opened(page, base_url)
    expect(dialog.get_by_role("listitem")).to_have_text(["small: loaded", "large: unloaded"])
    models[NAME] = "unloaded"
    download(dialog)
    expect(dialog.get_by_role("status")).to_have_text(f"{NAME} is loaded by its first message.")
    assert len(asked) == 1  # nothing is reloaded
    dialog.get_by_role("button", name="Close").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "Hi")
    assert sent.value.post_data_json["model"] == NAME


def test_of_several_models_one_is_watched(page: Page, base_url: str) -> None:
    page.route("**/health", lambda route: route.fulfill(json={"status": "ok", "models": MODELS}))
    with page.expect_request(re.compile("/live$")):
        page.goto(f"{base_url}/#engine")
    expect(page.locator("#numbers div")).not_to_have_count(0)
    choice = page.get_by_label("Watched model")
    expect(choice.get_by_role("option")).to_have_text(["the first loaded one", "small", "large"])
    expect(choice).to_have_value("")
    page.route("**/live?model=large", lambda route: route.fulfill(
        status=503, json={"error": {"message": "the model 'large' is not loaded"}}
    ))  # fmt: skip
    choice.select_option("large")
    expect(page.get_by_text("the model 'large' is not loaded")).to_be_visible()
    expect(page.locator("#numbers div")).to_have_count(0)
    choice.select_option("")
    expect(page.locator("#numbers div")).not_to_have_count(0)


def test_the_error_of_a_server_without_an_admin_key_is_shown(page: Page, base_url: str) -> None:
    dialog = opened(page, base_url)
    download(dialog)
    expect(dialog.get_by_role("status")).to_have_text(
        "there is no --admin-key, and so no /api/pull."
    )
