"""LoRA adapters over HTTP: by name, by llama-server's number, and as a `model`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from cllm.engine.config import EMBEDDED_MODEL
from tests.lora_files import make_lora
from tests.server.conftest import OPTIONS, Server, refusal_of, running

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model with two adapters, for who asks."""
    directory = tmp_path_factory.mktemp("loras")
    paths = [
        make_lora(directory / f"{seed}.gguf", EMBEDDED_MODEL, seed=seed, strength=3.0)
        for seed in (1, 2)
    ]
    options = [o for path in paths for o in ("--lora", f"adapter-{path.stem}={path}:0")]
    with running(directory / "log", *options) as server:
        yield server


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, **OPTIONS)


def text(server: Server, **body: Any) -> str:
    answer = post(server, "/generate", prompt="count:1..9", ignore_eos=True, **GREEDY, **body)
    assert answer.status_code == 200, answer.text
    told: str = answer.json()["text"]
    return told


def test_names_numbers_and_models_ask_for_the_same_adapters(server: Server) -> None:
    plain, first, second = (
        text(server, **body)
        for body in ({}, {"lora": {"adapter-1": 1.0}}, {"lora": {"adapter-2": 1.0}})
    )
    assert len({plain, first, second}) == 3
    assert text(server, lora=[{"id": 0, "scale": 1.0}]) == first
    assert text(server, lora=[{"id": 1, "scale": 1}]) == second
    assert text(server, model="adapter-2") == second
    assert text(server, model="adapter-2", lora={"adapter-1": 1.0}) == first
    assert text(server, lora={}) == text(server, lora=None) == plain
    assert text(server, model="some other name") == plain


def test_every_api_routes_by_the_name_of_the_model(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as api:
        names = [model.id for model in api.models.list()]
        assert names == ["cllm-tiny", "adapter-1", "adapter-2"]
        assert api.models.retrieve("adapter-1").id == "adapter-1"
        told = [
            {
                api.completions.create(model=name, prompt="count:1..9", **GREEDY).choices[0].text,
                api.chat.completions.create(
                    model=name, messages=[{"role": "user", "content": "count:1..9"}], **GREEDY
                ).choices[0].message.content,
                api.responses.create(
                    model=name, input="count:1..9", temperature=0, max_output_tokens=16
                ).output_text,
                post(
                    server, "/v1/messages", model=name,
                    messages=[{"role": "user", "content": "count:1..9"}], **GREEDY,
                ).json()["content"][0]["text"],
            }
            for name in names
        ]  # fmt: skip
    assert told[0].isdisjoint(told[1])
    assert told[1].isdisjoint(told[2])


def test_who_looks_sees_what_there_is(server: Server) -> None:
    listed = httpx.get(f"{server.url}/lora-adapters", **OPTIONS).json()
    assert [(each["id"], each["name"], each["scale"]) for each in listed] == [
        (0, "adapter-1", 0.0), (1, "adapter-2", 0.0)
    ]  # fmt: skip
    assert listed[0]["path"].endswith("1.gguf")
    assert listed[0]["alora_invocation_tokens"] == []


@pytest.mark.parametrize(
    ("lora", "field"),
    [
        ({"nobody": 1.0}, "lora"),
        ({"adapter-1": "1"}, "lora"),
        ({"adapter-1": 1e9}, "lora['adapter-1']"),
        ([{"id": 2, "scale": 1.0}], "lora[0].id"),
        ([{"id": 0.5, "scale": 1.0}], "lora[0]"),
        ([{"scale": 1.0}], "lora[0]"),
        ([{"id": 0, "scale": 1.0, "name": 3}], "lora[0]"),
        ("adapter-1", "lora"),
        ([{"id": 0, "scale": 1.0}] * 65, "lora"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_by_name(
    server: Server, lora: object, field: str
) -> None:
    answer = post(server, "/generate", prompt="x", lora=lora)
    refusal = refusal_of(answer)
    assert str(refusal["param"]).startswith(field)
