"""Take the pictures of the documentation from a running server: `make pictures`.

They show the server's page in Chromium, with the embedded model.  The environment must have playwright, as
`.venv-clients` has.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = {"width": 1100, "height": 780}
HEAD = "Count slowly, and do not stop before the end. " * 5  # a prefix that all requests share
N_REQUESTS = 12
READY_S = 60


@contextmanager
def server() -> Iterator[str]:
    """Serve the embedded model with few cells, so that requests share, wait and are preempted."""
    options = ("--port", "0", "--threads", "1", "-c", "1536", "-np", "4", "--kv-unified")
    with subprocess.Popen(
        [sys.executable, "-m", "cllm", "serve", *options], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if " at http" in line:
                break
        else:
            raise RuntimeError(f"the server has ended: {''.join(said)}")
        url = said[-1].split()[3]
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            until = time.monotonic() + READY_S
            while httpx.get(f"{url}/health").status_code != httpx.codes.OK:
                if time.monotonic() > until:
                    raise RuntimeError(f"the server is not ready after {READY_S} s")
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def chat_picture(page: Page, url: str) -> None:
    """Take the picture of two answers side by side."""
    page.goto(url)
    page.get_by_text("Settings").click()
    page.get_by_label("Answers side by side").fill("2")
    for text in ("1+1=", "repeat:**bold** and `code`"):
        page.get_by_label("Message", exact=True).fill(text)
        page.get_by_label("Message", exact=True).press("Enter")
        page.locator("#stop").wait_for(state="hidden")
    page.get_by_text("Settings").click()
    page.locator(".message.assistant .variant").last.wait_for()
    page.wait_for_function("document.querySelectorAll('.message.assistant .variant').length == 3")
    page.screenshot(path=IMAGES / "page-chat.png")


def engine_picture(page: Page, url: str) -> None:
    """Take the picture of an engine with shared prefixes, a queue and preemptions."""
    page.goto(f"{url}/#engine")
    page.get_by_role("tab", name="Engine").click()
    body = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0}
    with ThreadPoolExecutor(N_REQUESTS) as clients, httpx.Client(base_url=url, timeout=120) as http:
        answers = [
            clients.submit(http.post, "/generate", json={**body, "prompt": f"{HEAD}{number}"})
            for number in range(N_REQUESTS)
        ]
        # Two sequences that share a prefix, and a preemption, are what the picture shows.
        page.wait_for_function("document.querySelectorAll('#slots tr').length >= 3")
        page.wait_for_function(
            "document.querySelector('#kv-events').textContent.includes('preempted')"
        )
        page.screenshot(path=IMAGES / "page-engine.png")
        for answer in answers:
            answer.result().raise_for_status()


def main() -> int:
    """Take all pictures."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        sys.exit("pictures need chromium; on Debian: apt-get install chromium")
    with server() as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(
            viewport=SIZE, color_scheme="light", timezone_id="UTC", bypass_csp=True
        )
        chat_picture(page, url)
        engine_picture(page, url)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
