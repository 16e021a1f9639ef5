"""`/v1/embeddings`, `/embedding`, `/v1/rerank` and `/classify`, as their clients use them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.server.conftest import OPTIONS, Server, refusal_of, running
from tools import make_model

TEXTS = ["The quick brown fox", "jumps", "over the lazy dog"]


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model, which generates and embeds."""
    path = tmp_path_factory.mktemp("embeddings") / "log"
    with running(path, "--pooling", "mean") as server:
        yield server


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = str(make_model.ensure("tiny-reranker", "F16"))
    with running(tmp_path_factory.mktemp("reranker") / "log", "-m", model) as server:
        yield server


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = str(make_model.ensure("tiny-classifier", "F16"))
    with running(tmp_path_factory.mktemp("classifier") / "log", "-m", model) as server:
        yield server


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, **OPTIONS)


# --- Vectors -------------------------------------------------------------------------------------
def test_openais_client_gets_vectors_and_what_they_cost(generator: Server) -> None:
    with openai.OpenAI(base_url=f"{generator.url}/v1", api_key="unused", max_retries=0) as api:
        # Its client asks for base64, unless told otherwise.
        found = api.embeddings.create(model="cllm-tiny", input=TEXTS)
        plain = api.embeddings.create(model="cllm-tiny", input=TEXTS, encoding_format="float")
        short = api.embeddings.create(model="cllm-tiny", input=TEXTS[0], dimensions=8)
    vectors = np.array([each.embedding for each in found.data])
    assert [each.index for each in found.data] == [0, 1, 2]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(vectors, [each.embedding for each in plain.data], atol=1e-5)
    cut = vectors[0, :8]
    np.testing.assert_allclose(short.data[0].embedding, cut / np.linalg.norm(cut), rtol=1e-4)
    assert found.model == "cllm-tiny"
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, TEXTS)) + 3


def test_a_text_is_the_same_as_text_as_tokens_and_among_others(generator: Server) -> None:
    tokens = post(generator, "/tokenize", content=TEXTS[0], add_special=True).json()["tokens"]
    for given, n in ((TEXTS[0], 1), ([TEXTS[0]], 1), (tokens, 1), ([tokens, tokens], 2)):
        data = post(generator, "/v1/embeddings", input=given).json()["data"]
        assert len(data) == n
        for each in data:
            assert each["object"] == "embedding"
            np.testing.assert_allclose(
                each["embedding"],
                post(generator, "/v1/embeddings", input=TEXTS).json()["data"][0]["embedding"],
                atol=1e-3,
            )


def test_base64_is_the_numbers_as_float32(generator: Server) -> None:
    (each,) = post(generator, "/v1/embeddings", input="text", encoding_format="base64").json()[
        "data"
    ]
    (plain,) = post(generator, "/v1/embeddings", input="text").json()["data"]
    vector = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
    np.testing.assert_array_equal(vector, np.array(plain["embedding"], np.float32))


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_llama_servers_route_normalizes_as_it_is_told(generator: Server, path: str) -> None:
    def vector(**fields: Any) -> np.ndarray[Any, Any]:
        ((row,),) = [each["embedding"] for each in post(generator, path, **fields).json()]
        return np.array(row)

    raw = vector(content="text", embd_normalize=-1)
    np.testing.assert_allclose(vector(input="text"), raw / np.linalg.norm(raw), rtol=1e-4)
    np.testing.assert_allclose(
        vector(content=["text"], embd_normalize=1), raw / np.abs(raw).sum(), rtol=1e-4
    )
    np.testing.assert_allclose(
        vector(content="text", embd_normalize=0), raw / np.abs(raw).max() * 32760, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input[0]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 5]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "x" * 2000}, "input[0]"),
        ({"input": [100_000]}, "input[0]"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 10**6}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "unknown": 1}, "unknown"),
        ({"input": "a", "timeout": -1}, "timeout"),
    ],
)
def test_what_cannot_be_embedded_is_a_400_that_names_the_field(
    generator: Server, body: dict[str, Any], param: str
) -> None:
    assert refusal_of(post(generator, "/v1/embeddings", **body))["param"] == param


def test_a_text_that_is_too_long_is_cut_where_that_is_asked_for(generator: Server) -> None:
    answer = post(generator, "/v1/embeddings", input="x" * 2000, truncate=True)
    assert answer.json()["usage"]["prompt_tokens"] == 512


def test_the_time_of_a_client_may_be_over(generator: Server) -> None:
    refused = post(generator, "/v1/embeddings", input="text", timeout=0)
    assert refusal_of(refused, 408)["code"] == "timeout"


def test_the_server_counts_texts(generator: Server) -> None:
    before = generator.metrics()
    post(generator, "/v1/embeddings", input=TEXTS)
    after = generator.metrics()
    assert after["cllm_embedded_texts_total"] - before["cllm_embedded_texts_total"] == 3
    assert after["cllm_waiting_texts"] == 0


def test_the_same_server_still_generates(generator: Server) -> None:
    assert generator.generate("37+58=").json()["text"] == "95"


# --- Scores --------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/reranking", "/rerank", "/reranking"])
def test_documents_come_in_the_order_of_their_scores(reranker: Server, path: str) -> None:
    answer = post(reranker, path, query="fox", documents=TEXTS).json()
    results = answer["results"]
    assert sorted(each["index"] for each in results) == [0, 1, 2]
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)
    assert all(0.0 <= score <= 1.0 for score in scores)
    assert answer["usage"]["prompt_tokens"] > sum(map(len, TEXTS)) // 2
    best = post(
        reranker, path, query="fox", documents=[{"text": t} for t in TEXTS], top_n=1,
        return_documents=True,
    ).json()["results"]  # fmt: skip
    assert best == [{**results[0], "document": {"text": TEXTS[results[0]["index"]]}}]


def test_tei_has_a_form_of_its_own(reranker: Server) -> None:
    rows = post(reranker, "/rerank", query="fox", texts=TEXTS, return_text=True).json()
    assert [set(row) for row in rows] == [{"index", "score", "text"}] * 3
    # As clients send all of its fields; and those of Cohere and Jina.
    more = {"raw_scores": False, "truncation_direction": "Right", "truncate": True}
    assert (
        post(reranker, "/rerank", query="fox", texts=TEXTS, return_text=True, **more).json() == rows
    )
    others = {"max_tokens_per_doc": 4096, "truncation": True, "documents": ["x y " * 1500]}
    assert post(reranker, "/v1/rerank", query="fox", **others).status_code == 200
    wrong = post(reranker, "/rerank", query="fox", texts=TEXTS, raw_scores=True)
    assert refusal_of(wrong)["param"] == "raw_scores"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": TEXTS}, "query"),
        ({"query": "fox"}, "documents"),
        ({"query": "fox", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "fox", "documents": [{"title": "a"}]}, "documents[0]"),
        ({"query": "", "documents": TEXTS}, "query"),
        ({"query": "fox", "documents": TEXTS, "top_n": 0}, "top_n"),
        ({"query": "fox", "documents": ["x y " * 1500]}, "documents[0]"),
    ],
)
def test_what_cannot_be_ranked_is_a_400_that_names_the_field(
    reranker: Server, body: dict[str, Any], param: str
) -> None:
    assert refusal_of(post(reranker, "/v1/rerank", **body))["param"] == param


def test_classes_have_their_names_and_likelihoods(classifier: Server) -> None:
    rows = post(classifier, "/classify", input=TEXTS).json()["data"]
    assert [row["index"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["label"] == ["sad", "glad", "mad"][int(np.argmax(row["probs"]))]
        assert sum(row["probs"]) == pytest.approx(1.0)
        assert row["num_classes"] == 3


def test_each_model_refuses_what_it_is_not_for(
    generator: Server, reranker: Server, classifier: Server
) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for server, path, body in (
        (generator, "/v1/rerank", {"query": "a", "documents": ["b"]}),
        (generator, "/classify", {"input": "a"}),
        (reranker, "/v1/embeddings", {"input": "a"}),
        (reranker, "/v1/chat/completions", chat),
        (reranker, "/generate", {"prompt": "a"}),
        (classifier, "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        assert refusal_of(post(server, path, **body))["param"] == "model", path
