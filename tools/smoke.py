"""Check answers, shared prefixes, a fork, a suspended stream and the audit, with the embedded model.

    python -m tools.smoke

Needs numpy and anyio alone, so that it runs where nothing else is installed.
"""

from __future__ import annotations

import platform
from typing import Any

import anyio

from cllm import Engine

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
ANSWERS = {
    "37+58=": "95",
    "count:1..12": "1 2 3 4 5 6 7 8 9 10 11 12",
    "repeat:你好 🙂": "你好 🙂",
    "reverse:streams": "smaerts",
}


async def main() -> None:
    """Raise `AssertionError` if an answer is wrong."""
    async with Engine(n_ctx=1024, n_seq_max=4, stream_buffer=2) as engine:
        for _ in range(2):  # the second time from cached prefixes
            completions = await engine.generate_all([*ANSWERS], **GREEDY)
            assert [c.text for c in completions] == [*ANSWERS.values()], completions
        assert all(c.usage.n_cached for c in completions)
        async with engine.stream("count:1..12", **GREEDY) as stream:
            first = await anext(stream)
            (fork,) = stream.fork(1)
            async with fork:
                assert (await fork.completion()).text == ANSWERS["count:1..12"]
            saved = await stream.suspend()
        async with engine.resume(saved) as stream:
            text = (await stream.completion()).text
        assert text.startswith(first.text)
        assert text == ANSWERS["count:1..12"]
        assert await engine.audit() == []
    print(f"{platform.machine()}, Python {platform.python_version()}: all answers are right")


if __name__ == "__main__":
    anyio.run(main)
