"""The least that a server in Python does: an event loop, a thread that decodes, and the most likely token.

It has no checks, queue, prefix cache, stop strings, metrics or time limits.  Its figures beside llama-server's show
what the event loop, ctypes and Python's objects cost at least.
`python -m benchmarks.side_by_side.bare_server PORT` reads the settings as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from benchmarks.side_by_side.workload import Setup
from cllm.bindings import Batch, Context, Logits, Model

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
END_OF_HEAD, END = b"\r\n\r\n", b"0\r\n\r\n"

Send = Callable[[list[tuple[asyncio.Transport, bytes]]], object]


@dataclass
class Stream:
    """One request that decodes.

    Attributes
    ----------
    tokens : list of int
        Rows of the next decode: the prompt, and then the last token.
    n_output : int
        Tokens that are asked for.
    position : int
        Position of the first of `tokens`.
    """

    transport: asyncio.Transport
    tokens: list[int]
    n_output: int
    position: int = 0
    n_done: int = 0

    def event(self, piece: bytes) -> bytes:
        """Return the events of a token; those of the last token end the answer."""
        text = json.dumps(piece.decode("utf-8", "replace"))
        data = _chunk(f'{{"choices":[{{"index":0,"text":{text},"finish_reason":null}}]}}')
        if self.n_done < self.n_output:
            return data
        usage = f'"usage":{{"completion_tokens":{self.n_done}}}'
        return data + _chunk(f'{{"choices":[{{"finish_reason":"length"}}],{usage}}}') + END


def _chunk(event: str) -> bytes:
    line = f"data: {event}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(line), line)


def decode_for_ever(setup: Setup, inbox: SimpleQueue[Stream], ready: Callable[[], Send]) -> None:
    """Decode the streams of the inbox in one batch for each tick; run in a thread of its own.

    Parameters
    ----------
    ready : callable
        Called when the model is loaded; returns what sends the events of a tick.
    """
    with (
        Model(setup.model) as model,
        Context(**setup.context_options | {"model": model}) as context,
    ):
        send, batch = ready(), Batch(setup.n_batch)
        free, running = list(range(setup.n_seq_max)), dict[int, Stream]()
        while True:
            while free and not (running and inbox.empty()):
                running[free.pop()] = inbox.get()
            batch.clear()
            fitting = []
            for seq_id, stream in running.items():
                if batch.n_rows + len(stream.tokens) <= setup.n_batch:
                    batch.add(seq_id, stream.tokens, stream.position, n_outputs=1)
                    fitting.append((seq_id, stream))
            logits: Logits = context.decode(batch)
            events = []
            for row, (seq_id, stream) in zip(logits.rows, fitting, strict=True):
                token = int(row.argmax())
                stream.position += len(stream.tokens)
                stream.tokens, stream.n_done = [token], stream.n_done + 1
                events.append((stream.transport, stream.event(model.vocab.piece(token))))
                if stream.n_done == stream.n_output:
                    context.seq_rm(seq_id, 0, stream.position)
                    del running[seq_id]
                    free.append(seq_id)
            send(events)


class Connection(asyncio.Protocol):
    """Connection of one client.  It puts each POST into the inbox, and answers other requests with status 200."""

    def __init__(self, inbox: SimpleQueue[Stream]) -> None:
        self._inbox = inbox
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Read a request whose bytes have all arrived."""
        self._received += data
        head, found, body = self._received.partition(END_OF_HEAD)
        if not found:
            return
        if not head.startswith(b"POST"):
            self._transport.write(HEALTHY)
            self._transport.close()
        elif len(body) == int(head.lower().partition(b"content-length:")[2].split()[0]):
            self._received = b""
            asked = json.loads(body)
            self._transport.write(HEAD)
            self._inbox.put(Stream(self._transport, asked["prompt"], asked["max_tokens"]))


async def serve(setup: Setup, port: int) -> None:
    """Serve on a port of this machine until the process is ended."""
    loop, inbox, is_ready = asyncio.get_running_loop(), SimpleQueue[Stream](), asyncio.Event()

    def write(events: list[tuple[asyncio.Transport, bytes]]) -> None:
        for transport, data in events:
            transport.write(data)

    def ready() -> Send:
        loop.call_soon_threadsafe(is_ready.set)
        return lambda events: loop.call_soon_threadsafe(write, events)

    def decode() -> None:
        try:
            decode_for_ever(setup, inbox, ready)
        finally:
            loop.call_soon_threadsafe(loop.stop)  # the process ends with the error in its log

    threading.Thread(target=decode, daemon=True).start()
    await is_ready.wait()
    server = await loop.create_server(lambda: Connection(inbox), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(Setup.of_plain(json.load(sys.stdin)), int(sys.argv[1])))
