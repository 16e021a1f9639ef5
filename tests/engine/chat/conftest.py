"""A process that renders the chat templates of all tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cllm.engine.chat.chat_template import template_child

CHILD = template_child()


@pytest.fixture(scope="session", autouse=True)
def _the_process_ends() -> Iterator[None]:
    yield
    CHILD.close()
