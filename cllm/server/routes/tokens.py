"""Routes for tokens and texts, with the fields of llama-server and of vLLM, which lm-eval uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.responses import Response

from cllm import Engine
from cllm.server.answers.chat_call import chat_call_of, rendered
from cllm.server.bodies.schemas import ChatBody, DetokenizeBody, TokenizeBody
from cllm.server.http.body import SafeRoute
from cllm.server.http.problems import invalid
from cllm.server.http.replies import Reply, Writer, list_parts
from cllm.server.state import state_of

router: APIRouter = APIRouter(route_class=SafeRoute, tags=["llama-server"])

MAX_TOKENS = 1 << 20


@router.post("/tokenize", summary="Text to token ids")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return the token ids of `content`; with `with_pieces`, each as an object with `id` and `piece`.

    With vLLM's `prompt` in place of `content`, the answer also has `count` and `max_model_len`.
    """
    state = state_of(request)
    engine = state.serving
    text, add_special, more = _asked(body, engine.model.n_ctx)

    async def produce(writer: Writer) -> None:
        async with state.tokenizer_turn():
            tokens = await engine.tokenize(
                text, add_special=add_special, parse_special=body.parse_special
            )
            pieces = await engine.pieces(tokens) if body.with_pieces else None
            content = await anyio.to_thread.run_sync(_written, tokens, pieces, more)
        await writer.whole(content)

    return Reply(produce)


def _asked(body: TokenizeBody, n_ctx: int) -> tuple[str, bool, int | None]:
    """Return the text, True if special tokens are added, and `n_ctx` if the answer needs it."""
    if body.content is not None:
        if body.prompt is not None:
            raise invalid("prompt", "is not for a body that has content")
        return body.content, body.add_special, None
    if body.prompt is None:
        raise invalid("content", "is missing: content or prompt is the text")
    return body.prompt, body.add_special_tokens, n_ctx


@router.get("/tokenizer_info", summary="The chat template, and the tokens at the ends of a prompt")
async def tokenizer_info(request: Request) -> dict[str, str | int | None]:
    """Return the tokenizer's properties as vLLM does, for lm-eval with `tokenizer_backend=remote`."""
    model = state_of(request).serving.model
    return {
        "tokenizer_class": "cllm",
        "bos_token": model.bos_token,
        "eos_token": model.eos_token,
        "chat_template": model.chat_template,
        "max_model_len": model.n_ctx,
    }


def _written(tokens: Sequence[int], pieces: Sequence[bytes] | None, n_ctx: int | None) -> bytes:
    items: Iterable[object] = tokens
    if pieces is not None:
        both = zip(tokens, pieces, strict=True)
        items = ({"id": token, "piece": _piece(piece)} for token, piece in both)
    more = "" if n_ctx is None else f',"count":{len(tokens)},"max_model_len":{n_ctx}'
    return b'{"tokens":' + b"".join(list_parts(items)) + more.encode() + b"}"


def _piece(piece: bytes) -> str | list[int]:
    """Return a piece as text, or as a list of byte values if it is not valid UTF-8 by itself."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


@router.post("/detokenize", summary="Token ids to text")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Return the text of token ids, as `content` for llama-server's clients and `prompt` for vLLM's."""
    state = state_of(request)
    engine = state.serving
    _check_tokens(engine, body.tokens)

    async def produce(writer: Writer) -> None:
        async with state.tokenizer_turn():
            content = await engine.detokenize(body.tokens)
        await writer.json(lambda: {"content": content, "prompt": content})

    return Reply(produce)


@router.post("/apply-template", summary="A chat to the text of its prompt")
async def apply_template(body: ChatBody, request: Request) -> Response:
    """Return the prompt that the chat template makes of messages, without an answer."""
    state = state_of(request)
    return await rendered(
        state, chat_call_of(body, body.messages), lambda prompt: {"prompt": prompt.text}
    )


def _check_tokens(engine: Engine, tokens: Sequence[int]) -> None:
    if len(tokens) > MAX_TOKENS:
        raise invalid("tokens", f"has {len(tokens)}, must have at most {MAX_TOKENS}")
    n_vocab = engine.model.n_vocab
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < n_vocab:
            raise invalid("tokens", f"{token} is no token: they are 0 to {n_vocab - 1}")
