"""Embeddings, rankings and classes of texts, with the routes of OpenAI, llama-server, Jina, TEI and vLLM."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

import anyio.to_thread
import numpy as np
import orjson
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from pydantic import Field
from starlette.responses import Response

from cllm import Embeddings, InvalidRequestError, Ranked
from cllm.server.bodies.fields import Flag, Integer, Number, Prompts, Text
from cllm.server.bodies.schemas import HARMLESS, NEUTRAL, Body
from cllm.server.http.body import SafeRoute
from cllm.server.http.problems import invalid
from cllm.server.http.replies import Reply, Writer
from cllm.server.state import (
    ServerState,
    counting_if_given_up,
    log_request,
    note_tokens,
    request_id_of,
    state_of,
)

router: APIRouter = APIRouter(route_class=SafeRoute, tags=["embeddings"])

MAX_TEXTS = 2048  # as OpenAI has it
N_NUMBERS_FEW = 4096  # encoded in 0.2 to 0.4 ms
N_NUMBERS_ROW = 64  # a row takes as long as so many numbers
MAX_NORM = 1024  # largest `embd_normalize`: the p of the p-norm
INT16_LIKE = 32760.0  # llama-server's `embd_normalize: 0`: the largest number becomes this


class _TextsBody(Body):
    harmless: ClassVar[frozenset[str]] = HARMLESS | {"max_tokens_per_doc"}
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = NEUTRAL | {
        "raw_scores": (False,),
        "truncation_direction": ("Right", "right"),
    }

    model: Text | None = None
    truncate: Flag = Field(
        False, description="Cut texts that are too long, instead of refusing them"
    )
    timeout: Number | None = Field(None, description="Seconds from submission to the deadline")
    priority: Integer = Field(0, description="Lower is more urgent")

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of the engine's methods for texts."""
        return {"truncate": self.truncate, "timeout": self.timeout, "priority": self.priority}


class EmbeddingsBody(_TextsBody):
    """`POST /v1/embeddings`."""

    input: Prompts = Field(description="A text, token ids, or several of either")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Integer | None = Field(None, description="Length to cut each vector to")
    normalize: Flag = Field(True, description="Scale each vector to length 1")


class EmbeddingBody(_TextsBody):
    """`POST /embedding`, as llama-server has it."""

    content: Prompts | None = None
    input: Prompts | None = None
    embd_normalize: Integer = Field(
        2, description="-1: as it is; 0: the largest number becomes 32760; p: the p-norm becomes 1"
    )


class ClassifyBody(_TextsBody):
    """`POST /classify`."""

    input: Prompts


class RerankBody(_TextsBody):
    """`POST /v1/rerank`."""

    query: Text
    documents: list[Text | dict[str, Any]] | None = Field(
        None, description='Texts, or objects with "text"', fail_fast=True
    )
    texts: list[Text] | None = Field(None, description="The same as TEI calls it", fail_fast=True)
    top_n: Integer | None = Field(None, description="Best documents to return; all by default")
    return_documents: Flag = False
    return_text: Flag = False


# --- Vectors -------------------------------------------------------------------------------------
@router.post("/v1/embeddings", summary="The vectors of texts, as OpenAI has it")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Return one vector for each text, in the order of the texts."""
    state, engine = state_of(request), state_of(request).serving
    texts = several_texts(state, request, "input", body.input)

    async def produce(writer: Writer) -> None:
        with counting_if_given_up(request, texts), field_of_client("input"):
            found = await engine.embeddings(
                texts, dimensions=body.dimensions, normalize=body.normalize, **body.options
            )
        note_tokens(request, sum(found.n_tokens))
        is_base64 = body.encoding_format == "base64"
        encode = partial(_openai_answer, found, is_base64, state.model_name)
        await writer.whole(await _encoded(encode, found.vectors))

    return Reply(produce)


@router.post("/embedding", summary="The vectors of texts, as llama-server has it")
@router.post("/embeddings", include_in_schema=False)
async def embedding(body: EmbeddingBody, request: Request) -> Response:
    """Return one vector for each text, in the order of the texts."""
    state, engine = state_of(request), state_of(request).serving
    field, given = ("content", body.content) if body.input is None else ("input", body.input)
    if given is None:
        raise invalid("content", "is missing")
    if not -1 <= body.embd_normalize <= MAX_NORM:
        raise invalid("embd_normalize", f"is {body.embd_normalize}, must be -1 to {MAX_NORM}")
    texts = several_texts(state, request, field, given)

    async def produce(writer: Writer) -> None:
        with counting_if_given_up(request, texts), field_of_client(field):
            found = await engine.embeddings(texts, normalize=False, **body.options)
        note_tokens(request, sum(found.n_tokens))
        vectors = _normalized(found.vectors, body.embd_normalize)
        await writer.whole(await _encoded(partial(_llama_answer, vectors), vectors))

    return Reply(produce)


async def _encoded(encode: Callable[[], bytes], vectors: NDArray[np.float32]) -> bytes:
    """Return `encode()`; it runs in a worker thread if it takes longer than a change to another thread."""
    cost = vectors.size + N_NUMBERS_ROW * len(vectors)
    return encode() if cost <= N_NUMBERS_FEW else await anyio.to_thread.run_sync(encode)


def _openai_answer(found: Embeddings, is_base64: bool, model: str) -> bytes:
    """Return OpenAI's answer as JSON, encoded row by row: a thousand vectors are megabytes."""
    n_tokens = sum(found.n_tokens)
    rows = []
    for index, vector in enumerate(found.vectors):
        value: object = base64.b64encode(vector.tobytes()).decode() if is_base64 else vector
        rows.append(_row({"object": "embedding", "index": index, "embedding": value}))
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    head = {"object": "list", "model": model, "usage": usage}
    return orjson.dumps(head)[:-1] + b',"data":[' + b",".join(rows) + b"]}"


def _llama_answer(vectors: NDArray[np.float32]) -> bytes:
    rows = [_row({"index": i, "embedding": [vector]}) for i, vector in enumerate(vectors)]
    return b"[" + b",".join(rows) + b"]"


def _row(value: Mapping[str, object]) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _normalized(vectors: NDArray[np.float32], kind: int) -> NDArray[np.float32]:
    """Return vectors, one a row, scaled as llama-server does for the `kind` of `embd_normalize`."""
    if kind < 0 or not vectors.size:
        return vectors
    largest = np.abs(vectors).max(axis=1, keepdims=True).astype(np.float64)
    largest[largest == 0.0] = 1.0
    shares = vectors / largest  # high powers of numbers from 0 to 1 are finite
    norms = 1.0 / INT16_LIKE if kind == 0 else np.linalg.norm(shares, kind, axis=1, keepdims=True)
    norms = np.where(norms == 0.0, 1.0, norms)
    scaled: NDArray[np.float32] = (shares / norms).astype(np.float32)
    return scaled


# --- Scores --------------------------------------------------------------------------------------
@router.post("/v1/rerank", summary="Documents in the order of their relevance")
@router.post("/v1/reranking", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
@router.post("/reranking", include_in_schema=False)
async def rerank(body: RerankBody, request: Request) -> Response:
    """Return the documents, the best first, with scores of 0 to 1; TEI's form for `texts`, else Jina's."""
    state, engine = state_of(request), state_of(request).serving
    is_tei = body.texts is not None
    documents = list(body.texts) if body.texts is not None else _documents(body.documents)
    if len(documents) > MAX_TEXTS:
        field = "texts" if is_tei else "documents"
        raise invalid(field, f"has {len(documents)}, must have at most {MAX_TEXTS}")
    if body.top_n is not None and body.top_n < 1:
        raise invalid("top_n", f"is {body.top_n}, must be at least 1")
    log_request(state, request_id_of(request), body.query)

    async def produce(writer: Writer) -> None:
        with counting_if_given_up(request, (body.query, *documents)):
            ranked = await engine.rerank(body.query, documents, **body.options)
        best = ranked[: body.top_n]
        n_tokens = sum(each.n_tokens for each in ranked)
        note_tokens(request, n_tokens)
        if is_tei:
            rows = _tei_rows(best, documents if body.return_text else None)
            await writer.whole(orjson.dumps(rows))
            return
        answer = {
            "object": "list",
            "model": state.model_name,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
            "results": _jina_rows(best, documents if body.return_documents else None),
        }
        await writer.json(lambda: answer)

    return Reply(produce)


@router.post("/classify", summary="The class of each text")
@router.post("/v1/classify", include_in_schema=False)
async def classify(body: ClassifyBody, request: Request) -> Response:
    """Return the most likely label of each text and the probabilities of all labels, as vLLM does."""
    state, engine = state_of(request), state_of(request).serving
    texts = several_texts(state, request, "input", body.input)

    async def produce(writer: Writer) -> None:
        with counting_if_given_up(request, texts), field_of_client("input"):
            found = await engine.classify(texts, **body.options)
        n_tokens = sum(each.n_tokens for each in found)
        note_tokens(request, n_tokens)
        rows = [
            {
                "index": index,
                "label": each.label,
                "probs": list(each.scores.values()),
                "num_classes": len(each.scores),
            }
            for index, each in enumerate(found)
        ]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        answer = {"object": "list", "model": state.model_name, "data": rows, "usage": usage}
        await writer.json(lambda: answer)

    return Reply(produce)


def _documents(given: Sequence[str | Mapping[str, Any]] | None) -> list[str]:
    if given is None:
        raise invalid("documents", "is missing")
    texts = []
    for index, document in enumerate(given):
        text = document if isinstance(document, str) else document.get("text")
        if not isinstance(text, str):
            raise invalid(f"documents[{index}]", 'must be a text, or an object with "text"')
        texts.append(text)
    return texts


def _jina_rows(ranked: Sequence[Ranked], documents: Sequence[str] | None) -> list[dict[str, Any]]:
    return [
        {"index": each.index, "relevance_score": each.score}
        | ({} if documents is None else {"document": {"text": documents[each.index]}})
        for each in ranked
    ]


def _tei_rows(ranked: Sequence[Ranked], texts: Sequence[str] | None) -> list[dict[str, Any]]:
    return [
        {"index": each.index, "score": each.score}
        | ({} if texts is None else {"text": texts[each.index]})
        for each in ranked
    ]


# --- What a client sends -------------------------------------------------------------------------
@contextmanager
def field_of_client(field: str) -> Iterator[None]:
    """Rename `texts` to the client's `field` in an `InvalidRequestError` of the block."""
    try:
        yield
    except InvalidRequestError as error:
        if not error.field.startswith("texts"):
            raise
        name = field + error.field.removeprefix("texts")
        raise InvalidRequestError(name, error.value, error.limit) from error


def several_texts(state: ServerState, request: Request, field: str, given: Any) -> list[Any]:
    """Return the texts of a body, from 1 to 2048, as a list, and log them if `log_prompts` is set."""
    is_list = isinstance(given, list) and given and not isinstance(given[0], int)
    texts: list[Any] = given if is_list else [given]
    if given == [] or len(texts) > MAX_TEXTS:
        raise invalid(field, f"has {len(given)}, must have 1 to {MAX_TEXTS} texts")
    log_request(state, request_id_of(request), texts)
    return texts
