"""llama-server's `/tokenize` and `/detokenize`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from cllm import Engine
from cllm.server.body import SafeRoute
from cllm.server.problems import invalid
from cllm.server.schemas import DetokenizeBody, TokenizeBody
from cllm.server.state import state_of

router = APIRouter(route_class=SafeRoute, tags=["llama-server"])

# Tokens written at once: the encoder keeps the GIL, and with it every stream, until it is done.
N_AT_ONCE = 4096


@router.post("/tokenize", summary="Text to token ids")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """The tokens of a text; with `with_pieces`, what each stands for."""
    engine = state_of(request).serving
    tokens = await engine.tokenize(
        body.content, add_special=body.add_special, parse_special=body.parse_special
    )
    pieces = await engine.pieces(tokens) if body.with_pieces else None
    content = await anyio.to_thread.run_sync(_written, tokens, pieces)
    return Response(content, media_type="application/json")


def _written(tokens: Sequence[int], pieces: Sequence[bytes] | None) -> bytes:
    def items(at: slice) -> Iterator[object]:
        if pieces is None:
            return iter(tokens[at])
        both = zip(tokens[at], pieces[at], strict=True)
        return ({"id": token, "piece": _piece(piece)} for token, piece in both)

    slices = (slice(i, i + N_AT_ONCE) for i in range(0, len(tokens), N_AT_ONCE))
    parts = [json.dumps(list(items(at)))[1:-1].encode() for at in slices]
    return b'{"tokens": [' + b", ".join(parts) + b"]}"


def _piece(piece: bytes) -> str | list[int]:
    """Text, or the bytes that are none by themselves."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


@router.post("/detokenize", summary="Token ids to text")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, str]:
    """The text of some tokens."""
    engine = state_of(request).serving
    _check_tokens(engine, body.tokens)
    return {"content": await engine.detokenize(body.tokens)}


def _check_tokens(engine: Engine, tokens: Sequence[int]) -> None:
    n_vocab = engine.model.n_vocab
    for token in tokens:
        if not 0 <= token < n_vocab:
            raise invalid("tokens", f"{token} is no token: they are 0 to {n_vocab - 1}")
