"""The engine view of the page, which shows frames that the test makes."""

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
from playwright.sync_api import Page, expect

from tests.clients.conftest import say

STATISTICS = dict.fromkeys(
    ("n_running", "n_paused", "n_ticks", "n_output_tokens", "n_prefill_tokens", "n_cached_tokens", "n_preemptions",
     "n_swaps", "n_evictions", "n_restarts", "n_kv_cells_used", "n_kv_cells_cached", "n_finished",
     "n_prefix_bytes_host", "n_prefix_bytes_disk"), 0,
)  # fmt: skip


def slot(seq_id: int, state: str, **fields: Any) -> dict[str, Any]:
    """Return a slot of a frame."""
    empty = dict.fromkeys(("n_prompt", "n_output", "n_computed", "n_cached", "n_preemptions"), 0)
    return {"seq_id": seq_id, "state": state, "request_id": None, **empty, "age_s": 0.5, "media": [], "tenant": "",
            "waits_for": None, **fields}  # fmt: skip


def frame(number: int, **fields: Any) -> dict[str, Any]:
    """Return a frame: a prefix of 60 cells that two requests share with the prefix cache, and one that waits."""
    slots = [
        slot(0, "decode", request_id="r0", n_computed=70, n_output=number, tenant="ann"),
        slot(1, "prefill", request_id="r1", n_computed=60, tenant="bob"),
        slot(2, "cached", n_computed=80),
        slot(3, "waiting", request_id="r3", tenant="bob", waits_for=1),
    ]
    extents = [[0, 60, -1, [0, 1, 2]], [60, 70, 0, [0]], [60, 80, 0, [2]]]
    ticks = [
        [2, 510, 0, 0.001, 0.2, 0.002, 10.0 + number],
        [4, 0, 1, 0.001, 0.01, 0.001, 11.0 + number],
    ]
    statistics = {**STATISTICS, "n_kv_cells": 100, "n_kv_cells_used": 70, "n_kv_cells_cached": 80,
                  "n_prefix_bytes_host": 3 << 20, "n_restarts": 2, **fields.pop("statistics", {})}  # fmt: skip
    return {"number": number, "status": "ready", "slots": slots, "extents": extents, "ticks": ticks, "n_waiting": 0,
            "oldest_waiting_s": 0.0, "model": "m", "version": "1", "n_ctx": 100, "now": float(number),
            "devices": ["Vulkan0"], "has_process": True, "statistics": statistics, "ttft_s": [], "itl_s": [],
            **fields}  # fmt: skip


STREAM = """
    const fetchOf = window.fetch;
    window.fetch = async (...asked) => {
        if (!String(asked[0]).endsWith("live")) return fetchOf(...asked);
        const stream = new ReadableStream({
            start: (controller) => {
                window.tell = (frame) =>
                    controller.enqueue(new TextEncoder().encode(`data: ${JSON.stringify(frame)}\\n\\n`));
            },
        });
        return new Response(stream);
    };
"""


def shows(page: Page, base_url: str, *frames: dict[str, Any]) -> None:
    """Open the engine view on a stream of these frames that does not end."""
    page.add_init_script(STREAM)
    page.goto(f"{base_url}/#engine")
    page.wait_for_function("window.tell !== undefined")
    for each in frames:
        tells(page, each)
    expect(page.locator("#slots tr")).not_to_have_count(0)


def tells(page: Page, told: dict[str, Any]) -> None:
    """Let the server send a frame; return when the page has read it."""
    page.evaluate(
        "async (frame) => { window.tell(frame); await new Promise((done) => setTimeout(done)); }",
        told,
    )


def number_of(page: Page, name: str) -> Any:
    return page.locator("#numbers div", has=page.get_by_text(name, exact=True)).locator("dd")


def test_cells_are_counted_once_however_many_hold_them(page: Page, base_url: str) -> None:
    shows(page, base_url, frame(1))
    expect(number_of(page, "cells of requests")).to_have_text("70 (70 %)")
    expect(number_of(page, "cells cached")).to_have_text("20 (20 %)")


def test_a_waiting_sequence_names_the_one_that_computes_its_prefix(
    page: Page, base_url: str
) -> None:
    shows(page, base_url, frame(1))
    expect(page.locator("#slots")).to_contain_text("waits for the prefix of seq 1")


def test_tiers_devices_processes_and_tenants_are_told(page: Page, base_url: str) -> None:
    shows(page, base_url, frame(1))
    expect(number_of(page, "cached in host memory / on disk")).to_have_text("3 MiB / 0 MiB")
    expect(number_of(page, "devices")).to_have_text("Vulkan0")
    expect(number_of(page, "process of its own, restarts")).to_have_text("2")
    expect(number_of(page, "tenants")).to_have_text("ann: 1, bob: 2")


def test_few_rows_are_seen_beside_many(page: Page, base_url: str) -> None:
    shows(page, base_url, frame(1))
    expect(page.locator("#ticks")).to_have_attribute(
        "aria-label", "The latest 2 ticks: 512 rows at most, 203.0 ms at most"
    )
    # The 5 rows of the last tick have a tenth of the height of 512, not a hundredth.
    colored = page.locator("#ticks").evaluate(
        """canvas => {
            const scale = devicePixelRatio || 1;
            const [x, tall] = [canvas.width - 3 * scale, Math.floor(canvas.height / 2)];
            const column = canvas.getContext("2d").getImageData(x, 0, 1, tall).data;
            return [...column].filter((value, index) => index % 4 === 3 && value > 0).length / tall;
        }"""
    )
    assert 0.05 < colored < 0.15


def test_the_mouse_says_what_it_points_at(page: Page, base_url: str) -> None:
    shows(page, base_url, frame(1))
    lanes = page.locator("#lanes")
    width = lanes.evaluate("canvas => canvas.clientWidth")
    lanes.hover(position={"x": width / 4, "y": 10})
    expect(page.locator("#lanes-said")).to_have_text(
        "seq 0, decode · request r0 · positions 0 to 60 · shared by seq 0, seq 1, seq 2"
    )
    expect(page.locator("tr.pointed")).to_have_count(1)
    page.locator("#ticks").hover(position={"x": width - 2, "y": 20})
    expect(page.locator("#ticks-said")).to_contain_text("4 tokens, 0 of prompts, 1 guesses")
    expect(page.locator("#lanes-said")).to_be_empty()
    lanes.click(position={"x": width / 4, "y": 10})
    expect(page.get_by_role("status")).to_have_text("No chat of this page asked for it.")
    tells(page, frame(2))
    expect(page.get_by_role("status")).to_have_text("No chat of this page asked for it.")


def test_a_click_on_a_sequence_opens_the_chat_that_it_answers(page: Page, base_url: str) -> None:
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        headers={"content-type": "text/event-stream", "x-request-id": "r0"}, body=": nothing yet\n\n"
    ))  # fmt: skip
    page.add_init_script(STREAM)
    page.goto(base_url)
    page.evaluate(
        """() => {
            const ended = window.fetch;
            window.fetch = async (...asked) => {
                const response = await ended(...asked);
                if (!String(asked[0]).includes("chat/completions")) return response;
                const endless = new Response(new ReadableStream(), { headers: { "x-request-id": "r0" } });
                return endless;
            };
        }"""
    )
    say(page, "the one that is answered")
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("tab", name="Engine").click()
    page.wait_for_function("window.tell !== undefined")
    tells(page, frame(1))
    expect(page.locator("#slots tr")).not_to_have_count(0)
    page.locator("#lanes").click(position={"x": 100, "y": 10})
    expect(page.locator(".message.user .text")).to_have_text("the one that is answered")


def test_a_paused_view_stands_still_and_goes_on(page: Page, base_url: str) -> None:
    shows(page, base_url, frame(1))
    page.get_by_role("button", name="Pause").click()
    tells(page, frame(2, devices=["Vulkan1"]))
    tells(page, frame(3, devices=["Vulkan1"]))
    expect(page.locator("#ticks")).to_have_attribute("aria-label", re.compile("latest 2 ticks"))
    expect(number_of(page, "devices")).to_have_text("Vulkan0")
    page.get_by_role("button", name="Go on").click()
    tells(page, frame(4, devices=["Vulkan1"]))
    expect(number_of(page, "devices")).to_have_text("Vulkan1")
    expect(page.locator("#ticks")).to_have_attribute("aria-label", re.compile("latest 8 ticks"))


def test_an_error_of_the_engine_is_said_while_it_is_watched(page: Page, base_url: str) -> None:
    body = 'data: {"error": {"message": "the engine is broken"}}\n\n'
    page.route("**/live", lambda route: route.fulfill(
        headers={"content-type": "text/event-stream"}, body=body
    ))  # fmt: skip
    page.goto(f"{base_url}/#engine")
    expect(page.get_by_role("status")).to_have_text("the engine is broken")
    page.get_by_role("tab", name="Chat").click()
    expect(page.get_by_role("status")).to_be_empty()


def test_a_stream_with_an_event_that_cannot_be_shown_is_closed(page: Page, base_url: str) -> None:
    page.add_init_script("""
        const fetchOf = window.fetch;
        window.fetch = async (...asked) => {
            if (!String(asked[0]).endsWith("live")) return fetchOf(...asked);
            const start = (to) => to.enqueue(new TextEncoder().encode("data: no JSON\\n\\n"));
            return new Response(new ReadableStream({ start, cancel: () => { window.isClosed = true; } }));
        };
    """)
    page.goto(f"{base_url}/#engine")
    page.wait_for_function("window.isClosed")


def test_ticks_are_saved_as_a_trace_for_perfetto(page: Page, base_url: str) -> None:
    shows(page, base_url, frame(1))
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download trace").click()
    events = json.loads(Path(saved.value.path()).read_text(encoding="utf-8"))["traceEvents"]
    assert [event["name"] for event in events] == ["plan", "decode", "sample"] * 2
    assert all(event["ph"] == "X" for event in events)
    first, second, _, later, *_ = events
    assert (first["ts"], first["dur"]) == (11e6, pytest.approx(1000))
    assert second["ts"] == pytest.approx(11e6 + 1000)
    assert later["ts"] == 12e6
    assert first["args"] == {"decode": 2, "prompt": 510, "draft": 0}
