"""The page at `/`: what is served of it, to whom, and what a browser may do with it."""

from __future__ import annotations

import re

import pytest

from cllm.server.config import ServerConfig
from cllm.server.page import FILES
from tests.server.conftest import refusal_of
from tests.server.test_access import asgi

pytestmark = pytest.mark.anyio
MAX_BYTES = 300_000


async def test_the_page_and_all_it_asks_for_come_from_the_server_and_need_no_key() -> None:
    config = ServerConfig(api_key="right")
    page = await asgi(config, "GET", "/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    asked = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    for path in FILES.glob("*.js"):
        asked += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', path.read_text())]
    assert {f"page/{path.name}" for path in FILES.iterdir()} == {*asked, "page/index.html"}
    for source in asked:
        assert (await asgi(config, "GET", f"/{source}")).status_code == 200, source
    assert (await asgi(config, "GET", "/page/index.html")).status_code == 404
    # What it then asks for needs one.
    refusal_of(await asgi(config, "GET", "/live"), 401)


async def test_a_browser_may_run_only_what_came_from_here() -> None:
    page = await asgi(ServerConfig(), "GET", "/")
    policy = dict(
        rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy["script-src"], policy["style-src"], policy["connect-src"]} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'"
    assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|\sstyle=|javascript:", page.text)


def test_nothing_of_it_asks_another_host_or_makes_nodes_of_text() -> None:
    for path in FILES.iterdir():
        text = path.read_text()
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path
        hosts = set(re.findall(r"https?://([\w.-]+)", text)) - {"github.com", "www.w3.org"}
        assert not hosts, (path, hosts)


def test_all_of_it_is_small() -> None:
    assert 10_000 < sum(path.stat().st_size for path in FILES.iterdir()) <= MAX_BYTES


async def test_without_it_there_is_nothing() -> None:
    config = ServerConfig(page=False)
    refusal_of(await asgi(config, "GET", "/"), 404)
    refusal_of(await asgi(config, "GET", "/page/main.js"), 404)
