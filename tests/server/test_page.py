"""The page at `/`: what is served of it, to whom, and what a browser may do with it."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import typer

from cllm.cli.app import command_line
from cllm.server.config import ServerConfig
from cllm.server.routes.page import FILES
from tests.server.conftest import refusal_of
from tests.server.test_access import asgi

pytestmark = pytest.mark.anyio
MAX_BYTES = 400_000  # of all files, as they are transferred
LIBRARIES = {"markdown-it.js", "highlight.js", "temml.js"}


async def test_the_page_and_all_it_asks_for_come_from_the_server_and_need_no_key() -> None:
    config = ServerConfig(api_key="right")
    page = await asgi(config, "GET", "/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    asked = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    for path in FILES.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        asked += [f"page/{name}" for name in re.findall(r'(?:from |import\()"\./([^"]+)"', text)]
        asked += re.findall(r'ask\("(page/[^"]+)"\)', text)
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
        text = path.read_text(encoding="utf-8")
        if path.name not in LIBRARIES:  # highlight.js gives its parts to an emitter of `code.js`
            forbidden = r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|highlightElement"
            assert not re.search(forbidden, text), path
        hosts = set(re.findall(r"https?://([\w.-]+)", text)) - {"github.com", "www.w3.org"}
        assert not hosts, (path, hosts)


async def test_all_of_it_is_small() -> None:
    n_bytes = 0
    for path in FILES.iterdir():
        url = "/" if path.name == "index.html" else f"/page/{path.name}"
        answer = await asgi(ServerConfig(), "GET", url, headers={"accept-encoding": "gzip"})
        n_bytes += int(answer.headers["content-length"])
    assert 10_000 < n_bytes <= MAX_BYTES


@pytest.mark.parametrize(
    ("accepted", "is_compressed"),
    [
        ("gzip", True), ("br, gzip;q=0.5", True), ("*", True), ("identity", False), ("gzip;q=0", False),
        ("gzip; q=0.0", False), ("br", False), ("notgzip", False),
    ],
)  # fmt: skip
async def test_a_file_is_compressed_for_clients_that_take_it_and_sent_once(
    accepted: str, is_compressed: bool
) -> None:
    headers = {"accept-encoding": accepted}
    answer = await asgi(ServerConfig(), "GET", "/page/main.js", headers=headers)
    assert answer.content == (FILES / "main.js").read_bytes()
    assert answer.headers.get("content-encoding") == ("gzip" if is_compressed else None)
    headers["if-none-match"] = answer.headers["etag"]
    again = await asgi(ServerConfig(), "GET", "/page/main.js", headers=headers)
    assert (again.status_code, again.content) == (304, b"")
    headers["if-none-match"] = '"other"'
    assert (await asgi(ServerConfig(), "GET", "/page/main.js", headers=headers)).status_code == 200


def test_the_licence_of_each_library_is_shown() -> None:
    text = (FILES / "licences.txt").read_text(encoding="utf-8")
    for name in LIBRARIES:
        library, version = re.findall(r"(\S+) v(\S+)", (FILES / name).read_text(encoding="utf-8"))[
            0
        ]
        assert f"== {library} {version}: ".lower() in text.lower()


def test_every_module_of_the_first_view_is_preloaded() -> None:
    page = (FILES / "index.html").read_text(encoding="utf-8")
    preloaded = set(re.findall(r'rel="modulepreload" href="page/([^"]+)"', page))
    later = {"highlight.js", "temml.js", "main.js"}
    assert preloaded == {path.name for path in FILES.glob("*.js")} - later


def test_the_commands_that_it_shows_can_be_typed() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in FILES.glob("*.js"))
    commands = re.findall(r'"cllm (\w+) ([^"]+)"', text)
    assert len(commands) >= 2
    for name, arguments in commands:
        group = cast(Any, typer.main.get_command(command_line(name)))
        group.commands[name].make_context(name, arguments.split())  # raises for a wrong one


async def test_without_it_there_is_nothing() -> None:
    config = ServerConfig(page=False)
    refusal_of(await asgi(config, "GET", "/"), 404)
    refusal_of(await asgi(config, "GET", "/page/main.js"), 404)


def relative_luminance(color: str) -> float:
    """Of WCAG 2."""
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    """1 to 21."""
    darker, lighter = sorted((relative_luminance(one), relative_luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("block", [0, 1], ids=["light", "dark"])
def test_colours_differ_as_much_as_wcag_asks(block: int) -> None:
    """4.5 for text, 3 for what a picture or the edge of a field says."""
    css = (FILES / "page.css").read_text(encoding="utf-8")
    colors = dict(
        re.findall(r"--([\w-]+): (#\w{6});", re.findall(r":root \{(.*?)\}", css, re.S)[block])
    )
    for text, on in [
        ("text", "back"), ("text", "panel"), ("soft", "back"), ("soft", "panel"),
        ("accent", "back"), ("on-accent", "accent"), ("error", "back"),
    ]:  # fmt: skip
        assert contrast(colors[text], colors[on]) >= 4.5, (text, on)
    parts = ["edge", "decode", "prompt", "draft", "t-plan", "t-decode", "t-sample"]
    for part, on in [
        *((part, "back") for part in parts), ("edge", "panel"),
        ("own", "free"), ("shared", "free"), ("cached", "free"),
    ]:  # fmt: skip
        assert contrast(colors[part], colors[on]) >= 3.0, (part, on)
