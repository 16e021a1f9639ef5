"""A record of what the callers of a load do with their streams."""

from __future__ import annotations

from typing import Any

import pytest

from cllm import TokenDelta, TokenStream


def diary_of_callers(patch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that gets ("enter", "read" or "leave", request id) for each use of a stream, in order.

    The list has an order and no times, so it is the same on a machine of any speed.
    """
    diary: list[tuple[str, str]] = []
    was_enter, was_read, was_leave = (
        TokenStream.__aenter__,
        TokenStream.__anext__,
        TokenStream.__aexit__,
    )

    async def enter(stream: TokenStream) -> TokenStream:
        diary.append(("enter", stream.request_id))
        return await was_enter(stream)

    async def read(stream: TokenStream) -> TokenDelta:
        diary.append(("read", stream.request_id))
        return await was_read(stream)

    async def leave(stream: TokenStream, *raised: Any) -> None:
        diary.append(("leave", stream.request_id))
        await was_leave(stream, *raised)

    patch.setattr(TokenStream, "__aenter__", enter)
    patch.setattr(TokenStream, "__anext__", read)
    patch.setattr(TokenStream, "__aexit__", leave)
    return diary
