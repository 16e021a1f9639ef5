"""Layers of a model on llama.cpp's RPC servers: the same tokens; what becomes of requests as servers come and go."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anyio
import pytest

from cllm import Engine, EngineFailedError, RpcServerError
from cllm.bindings import Model, library
from cllm.engine.config import EMBEDDED_MODEL
from cllm.engine.llama.rpc import find_server
from cllm.engine.rpc_address import rpc_address
from tests.conftest import QUIET

pytestmark = [pytest.mark.rpc, pytest.mark.anyio]

OPTIONS: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 8, "n_threads": 1, **QUIET}
PROMPTS = ("count:1..30", "Hello", "the quick brown fox", "1 + 1 =")
LONG_PROMPT = "In a small town in the north " * 8
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SOON_S = 30.0  # within which nothing here may hang


class RpcServer:
    """A ggml-rpc-server of the same build, on a port of its own that it keeps."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        program = library().path.parents[1] / "bin" / "ggml-rpc-server"
        self.process = subprocess.Popen(
            [program, "-H", "127.0.0.1", "-p", str(self.port), "-t", "1"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
        find_server(rpc_address(self.address), lambda: self.process.poll() is not None)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def servers() -> Iterator[list[RpcServer]]:
    with ExitStack() as running:
        started = [RpcServer() for _ in range(2)]
        for server in started:
            running.callback(server.end)
        yield started


def over(*servers: RpcServer) -> dict[str, Any]:
    return {**OPTIONS, "process": True, "rpc": [server.address for server in servers]}


async def answers(engine: Engine) -> list[tuple[int, ...]]:
    completions = await engine.generate_all(PROMPTS, **GREEDY)
    return [tuple(completion.token_ids) for completion in completions]


async def read(engine: Engine, on_token: Callable[[], None]) -> None:
    """A long answer, and something that happens while it comes."""
    async with engine.stream(PROMPTS[0], **{**GREEDY, "max_tokens": 2000}) as stream:
        async for _ in stream:
            on_token()


@pytest.mark.parametrize("n_servers", [1, 2])
async def test_layers_on_servers_give_the_tokens_of_this_machine(
    servers: list[RpcServer], n_servers: int, caplog: pytest.LogCaptureFixture
) -> None:
    used = servers[:n_servers]
    async with Engine(**OPTIONS) as engine:
        expected = await answers(engine)
    caplog.set_level(logging.INFO, logger="cllm.llama")
    async with Engine(**over(*used)) as engine:
        assert await answers(engine) == expected
        assert await answers(engine) == expected  # over what is cached
        assert await engine.audit() == []
    for server in used:
        assert f"[{server.address}] model buffer size" in caplog.text


async def test_a_server_that_dies_and_comes_back_costs_a_pause(servers: list[RpcServer]) -> None:
    long = {**GREEDY, "max_tokens": 1500}  # more than can be computed ahead of a reader
    async with Engine(**OPTIONS) as engine:
        expected = await engine.generate(PROMPTS[0], **long)
    async with Engine(**over(*servers)) as engine:
        token_ids: list[int] = []
        with anyio.fail_after(2 * SOON_S):
            async with engine.stream(PROMPTS[0], **long) as stream:
                async for delta in stream:
                    if not token_ids:
                        servers[1].end()
                        await anyio.to_thread.run_sync(servers[1].start)
                    token_ids += delta.token_ids
        assert tuple(token_ids) == tuple(expected.token_ids)
        assert engine.statistics().n_restarts >= 1
        assert await engine.audit() == []


async def test_a_server_that_dies_ends_its_engine_by_an_error_with_its_address(
    servers: list[RpcServer],
) -> None:
    async with Engine(**over(*servers)) as engine:
        began = time.monotonic()
        with anyio.fail_after(SOON_S), pytest.raises(EngineFailedError) as caught:
            await read(engine, servers[0].end)
        assert isinstance(caught.value.__cause__, RpcServerError)
        assert caught.value.__cause__.address == servers[0].address
        assert time.monotonic() - began < SOON_S
    async with Engine(**OPTIONS) as engine:  # this process goes on
        assert (await engine.generate("Hello", **GREEDY)).token_ids


async def test_a_server_that_hangs_in_a_decode_ends_its_engine_likewise(
    servers: list[RpcServer],
) -> None:
    async with Engine(**over(*servers), hang_timeout_s=1.5) as engine:
        with anyio.fail_after(SOON_S), pytest.raises(EngineFailedError) as caught:
            await read(engine, servers[0].stop)
        assert isinstance(caught.value.__cause__, RpcServerError)
        assert "another client, or hangs" in caught.value.__cause__.reason


async def test_a_server_that_is_absent_refuses_the_start(servers: list[RpcServer]) -> None:
    servers[1].end()
    with anyio.fail_after(SOON_S), pytest.raises(RpcServerError, match="no server listens there"):
        async with Engine(**over(*servers)):
            pass


async def test_a_busy_server_refuses_the_second_engine_and_outlives_it(
    servers: list[RpcServer],
) -> None:
    async with Engine(**over(servers[0])) as engine:
        with anyio.fail_after(SOON_S), pytest.raises(RpcServerError, match="another client"):
            async with Engine(**over(servers[0])):
                pass
        expected = await answers(engine)
    async with Engine(**over(servers[0])) as engine:  # which the greetings have not ended
        assert await answers(engine) == expected
    assert servers[0].process.poll() is None


async def test_a_model_is_tried_on_the_servers_before_it_is_loaded(
    servers: list[RpcServer],
) -> None:
    async with Engine(**over(*servers), preflight=True) as engine:
        assert (await engine.generate("Hello", **GREEDY)).token_ids


def test_a_library_with_rpc_sees_no_gpu_where_there_is_none() -> None:
    assert library().record["backends"] == ["cpu", "rpc"]
    assert not library().has_gpu
    with Model(EMBEDDED_MODEL) as model:
        assert not model.is_on_gpu
