"""The dashboard and the alert rules of deploy/ are valid, and ask for metrics that a server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import yaml

from cllm.server import ServerConfig, create_app
from cllm.testing import FakeEngine

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "cllm.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
BY_PROMETHEUS = {"up"}  # metrics of the scrape itself


def metrics_of(expr: str) -> Iterator[str]:
    """Names of the metrics in a query; parsing it raises an error if it is not PromQL."""
    plain = expr.replace("$__rate_interval", "5m").replace("$instance", ".*")
    parsed = promql_parser.parse(plain)
    yield from re.findall(r"\b(cllm_\w+|up)\b(?=[{\[)\s]|$)", parsed.prettify())


@pytest.mark.anyio
async def test_the_queries_are_promql_about_metrics_that_a_server_has(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[a]\nkey = "k"\n')
    async with FakeEngine(lambda _: "x") as engine:
        transport = httpx.ASGITransport(
            create_app(engine, ServerConfig(api_keys=str(keys), api_key="whole"))
        )
        headers = {"Authorization": "Bearer whole"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers
        ) as client:
            await client.post("/generate", json={"prompt": "a"})
            text = (await client.get("/metrics")).text
    known = set(re.findall(r"^(cllm_\w+)", text, re.MULTILINE)) | BY_PROMETHEUS
    for expr in [*QUERIES, *(rule["expr"] for rule in RULES)]:
        asked = set(metrics_of(expr))
        assert asked, expr
        assert asked <= known, expr


def test_each_rule_says_what_is_wrong_and_how_bad_it_is() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
        names = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        grouped = re.search(r"sum by \(([\w, ]+)\)", rule["expr"])
        if grouped is not None:
            assert names <= set(grouped[1].split(", "))


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set[tuple[int, int]]()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
