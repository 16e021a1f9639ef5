"""The rows of the hazard table as cases, and the process that runs each in a child of its own.

Every case is one thing that would make libllama abort, hang or lie.  Run as a program, this file is
a server: it reads numbers of cases from its standard input and forks for each (before it has loaded
libllama, which no fork survives), so that a case costs milliseconds and can kill nobody but itself.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cllm.bindings import (
    Batch,
    Candidates,
    Context,
    Grammar,
    Logits,
    LoraAdapter,
    Model,
    SamplerChain,
    Vocabulary,
)
from cllm.errors import (
    ClosedError,
    ContextError,
    InUseError,
    InvalidArgumentError,
    LlamaCallError,
    ModelLoadError,
    NoKVSlotError,
    PositionError,
    StaleLogitsError,
    WrongProcessError,
    WrongThreadError,
)
from tools import make_model

NAN, INF = float("nan"), float("inf")
INT_MAX = 2**31 - 1
N_VOCAB = 260
TIME_LIMIT_S = 20
SMALL: dict[str, Any] = {
    "n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_seq_max": 4, "n_threads": 1,
    "n_threads_batch": 1,
}  # fmt: skip


class Scene:
    """What a case needs, made when it asks for it."""

    def __init__(self, path: Path, directory: Path) -> None:
        self.path = path
        self.directory = directory

    @cached_property
    def model(self) -> Model:
        return Model(self.path)

    @cached_property
    def vocab(self) -> Vocabulary:
        return self.model.vocab

    @cached_property
    def context(self) -> Context:
        return self.new_context()

    @cached_property
    def split(self) -> Context:
        """A context in the per-sequence layout."""
        return self.new_context(kv_unified=False, n_ctx=1024)

    @cached_property
    def batch(self) -> Batch:
        return Batch(128)

    @cached_property
    def chain(self) -> SamplerChain:
        return SamplerChain(self.vocab)

    @cached_property
    def grammar(self) -> Grammar:
        return Grammar(self.vocab, 'root ::= "ab"')

    def new_context(self, **parameters: Any) -> Context:
        return Context(self.model, **{**SMALL, **parameters})

    def decode(
        self, n_tokens: int = 4, *, seq_id: int = 0, p0: int = 0, context: Context | None = None
    ) -> Logits:
        """One batch of one sequence; its last row is an output."""
        self.batch.clear()
        self.batch.add(seq_id, range(97, 97 + n_tokens), p0, n_outputs=1)
        return (context or self.context).decode(self.batch)

    def decoded(self, n_tokens: int = 4) -> Context:
        """The context with tokens in sequence 0."""
        self.decode(n_tokens)
        return self.context

    def split_decoded(self) -> Context:
        self.decode(context=self.split)
        return self.split

    def file(self, name: str, content: bytes) -> Path:
        path = self.directory / name
        path.write_bytes(content)
        return path

    def lora(self) -> Path:
        """A LoRA adapter for the query matrix of the tiny model's second layer."""
        path = self.directory / "lora.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 4.0)
        for name, shape in (("lora_a", (4, 64)), ("lora_b", (128, 4))):
            data = np.full(shape, 0.1, np.float32)
            writer.add_tensor(f"blk.1.attn_q.weight.{name}", data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def check_alive(self) -> None:
        """A good batch still gives finite logits, in every context that is open."""
        for name in ("context", "split"):
            context = self.__dict__.get(name)
            if context is not None and not context.closed:
                context.set_abort(False)
                context.memory_clear()
                assert np.isfinite(self.decode(context=context).rows).all(), "logits not finite"


@dataclass(frozen=True)
class Case:
    """`act(scene)` must raise `error` and say all of `says`."""

    claim: str
    act: Callable[[Scene], object]
    says: tuple[str, ...]
    error: type[Exception] = InvalidArgumentError


CASES: list[Case] = []


def refuse(
    claim: str,
    act: Callable[..., object],
    *says: str,
    error: type[Exception] = InvalidArgumentError,
    **bound: Any,
) -> None:
    """Add a case; `bound` are further arguments of `act`."""

    def bound_act(scene: Scene) -> object:
        return act(scene, **bound)

    CASES.append(Case(claim, bound_act, says, error))


def in_thread(action: Callable[[], object]) -> None:
    """Run `action` on another thread and raise here what it raises there."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def in_fork(action: Callable[[], object]) -> None:
    """Run `action` in a forked child and raise here what it raises there."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(TIME_LIMIT_S)
        try:
            action()
            answer = ""
        except WrongProcessError as error:
            answer = str(error)
        except BaseException as error:
            answer = repr(error)
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answer = stream.read()
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"the forked child ended with status {status}"
    assert answer, "nothing was raised"
    raise WrongProcessError(answer)


# What the loops below go through: as wrong in type as in value.
bad_token: Any
bad_seq: Any
bad_p0: Any
bad_n: Any
n_threads: Any
n_positions: Any
scale: Any


# --- 1.1 Batches and decode ------------------------------------------------------------------
def add_tokens(scene: Scene, tokens: Any) -> None:
    scene.context  # noqa: B018  # so that it is asked for a sign of life afterwards
    scene.batch.add(0, tokens, 0)


def decode_token(scene: Scene, token: int) -> None:
    scene.batch.add(0, [5, token, 5], 0)
    scene.context.decode(scene.batch)


def add_row(scene: Scene, seq_id: Any = 0, p0: Any = 0, n_outputs: Any = 0) -> None:
    scene.context  # noqa: B018
    scene.batch.add(seq_id, [97], p0, n_outputs=n_outputs)


def decode_row(scene: Scene, seq_id: int, p0: int) -> None:
    scene.batch.add(seq_id, [97], p0)
    scene.context.decode(scene.batch)


def decode_at(scene: Scene, p0: int) -> None:
    """After four tokens of sequence 0."""
    scene.decoded()
    scene.decode(2, p0=p0)


def add_runs(scene: Scene, runs: list[tuple[int, int, int]]) -> None:
    scene.context  # noqa: B018
    for seq_id, p0, n_tokens in runs:
        scene.batch.add(seq_id, [97] * n_tokens, p0)


def decode_rows(scene: Scene, n_rows: int, n_outputs: int) -> None:
    if n_rows:
        scene.batch.add(0, [97] * n_rows, 0, n_outputs=n_outputs)
    scene.context.decode(scene.batch)


def decode_outputs_of_two_sequences(scene: Scene) -> None:
    scene.batch.add(0, [97] * 3, 0, n_outputs=3)
    scene.batch.add(1, [97] * 3, 0, n_outputs=2)
    scene.context.decode(scene.batch)


def fill_sequence(scene: Scene, context: Context) -> None:
    for p0 in range(0, 256, 64):
        scene.decode(64, p0=p0, context=context)
    scene.decode(1, p0=256, context=context)


def fill_cells(scene: Scene) -> None:
    for seq_id in range(4):
        scene.decode(63, seq_id=seq_id)
    scene.decode(10, seq_id=3, p0=63)


ANY_TOKEN = f"must be 0 to {INT_MAX}"
refuse("a run of no tokens", add_tokens, "rows is 0, must be 1 to 128", tokens=[])
refuse("a run longer than the batch", add_tokens, "rows is 129, must be 1 to 128", tokens=[5] * 129)
refuse("a batch of no rows", decode_rows, "rows is 0, must be 1 to 64", n_rows=0, n_outputs=0)
refuse("rows over n_batch", decode_rows, "rows is 65, must be 1 to 64", n_rows=65, n_outputs=0)
for bad_token in (-1, -(2**31), -(2**40), 2**31, 2**40):
    refuse(f"token {bad_token}", add_tokens, f"is {bad_token}, {ANY_TOKEN}", tokens=[bad_token])
    refuse(
        f"token {bad_token} among good ones", add_tokens, f"is {bad_token}, {ANY_TOKEN}",
        tokens=[5, bad_token, 5],
    )  # fmt: skip
for bad_tokens in (
    [1.5], [1.0], ["5"], ["x"], "55", [None], [NAN], [2**63], [2**70], [[1, 2]], [b"5"], [True],
    np.array([1.5]),
):  # fmt: skip
    refuse(f"tokens {bad_tokens!r}", add_tokens, str(bad_tokens)[1:-1], tokens=bad_tokens)
for bad_token in (N_VOCAB, N_VOCAB + 1, INT_MAX):
    refuse(
        f"token {bad_token} of {N_VOCAB}", decode_token,
        f"token is {bad_token}, must be 0 to {N_VOCAB - 1}", token=bad_token,
    )  # fmt: skip
for bad_seq in (-1, 256, 2**31, 2**32, 1.0, "0", None):
    refuse(
        f"seq_id {bad_seq!r} of a run", add_row, f"seq_id is {bad_seq!r}, must be", seq_id=bad_seq
    )
for bad_seq in (4, 255):
    refuse(
        f"seq_id {bad_seq} of n_seq_max 4", decode_row, f"seq_id is {bad_seq}, must be 0 to 3",
        seq_id=bad_seq, p0=0,
    )  # fmt: skip
for bad_p0 in (-1, -(2**31), INT_MAX, 2**32, 0.0, "0", None):
    refuse(f"p0 {bad_p0!r}", add_row, f"p0 is {bad_p0!r}, must be", p0=bad_p0)
for bad_n in (-1, 2, "1"):
    refuse(
        f"n_outputs {bad_n!r} of one token", add_row, f"n_outputs is {bad_n!r}, must be",
        n_outputs=bad_n,
    )  # fmt: skip
refuse(
    "a position past n_ctx_seq", decode_row, "position is 256, must be 0 to 255", seq_id=0, p0=256
)
refuse(
    "a token for a full sequence", lambda s: fill_sequence(s, s.context),
    "position is 256, must be 0 to 255",
)  # fmt: skip
refuse(
    "a token for a full sequence of the per-sequence layout",
    lambda s: fill_sequence(s, s.split), "position is 256, must be 0 to 255",
)  # fmt: skip
refuse(
    "more tokens than cells", fill_cells, "llama_decode returned 1", "no room", error=NoKVSlotError
)
for what, bad_p0 in (("gap after", 5), ("repeat of", 3), ("step back from", 0)):
    refuse(
        f"a {what} the last position", decode_at, "X = 3", f"Y = {bad_p0}", "p0 is",
        error=PositionError, p0=bad_p0,
    )  # fmt: skip
refuse(
    "a first position other than 0", decode_row, "p0 is 7, must be 0", "X = -1", "Y = 7",
    error=PositionError, seq_id=0, p0=7,
)  # fmt: skip
for what, bad_runs in (
    ("a duplicate position", [(0, 0, 1), (0, 0, 1)]),
    ("an overlap", [(0, 0, 3), (0, 2, 2)]),
    ("a gap", [(0, 0, 1), (0, 2, 1)]),
    ("a gap behind another sequence", [(0, 0, 1), (1, 0, 1), (0, 2, 1)]),
):
    last = bad_runs[0][2] - 1
    refuse(
        f"{what} inside a batch", add_runs, f"X = {last}", f"Y = {bad_runs[-1][1]}",
        error=PositionError, runs=bad_runs,
    )  # fmt: skip
refuse(
    "outputs over n_outputs_max", decode_rows, "output rows is 5, must be 0 to 4", n_rows=5,
    n_outputs=5,
)  # fmt: skip
refuse(
    "outputs of two sequences over n_outputs_max", decode_outputs_of_two_sequences,
    "output rows is 5, must be 0 to 4",
)  # fmt: skip
for bad_n in (0, -1, 2**20 + 1, 2**40, 8.0, "8"):
    refuse(
        f"a batch for {bad_n!r} rows", lambda _, n: Batch(n), f"n_rows_max is {bad_n!r}, must be",
        n=bad_n,
    )  # fmt: skip


# --- 1.1 Logits ------------------------------------------------------------------------------
def rows_after_later_decode(scene: Scene) -> object:
    logits = scene.decode()
    scene.decode(1, p0=4)
    return logits.rows


def rows_after_refusal_by_llama(scene: Scene) -> object:
    logits = scene.decode(63)
    for seq_id in (1, 2, 3):
        logits = scene.decode(63, seq_id=seq_id)
    try:
        scene.decode(10, p0=63)
    except NoKVSlotError:
        return logits.rows
    return None


def abort_decode(scene: Scene) -> Logits:
    logits = scene.decode()
    scene.context.set_abort(True)
    try:
        scene.decode(1, p0=4)
    except LlamaCallError:
        scene.context.set_abort(False)
    return logits


def sample_row(scene: Scene, row: Any, n_tokens: int = 4) -> int:
    scene.chain.add_greedy()
    scene.decode(n_tokens)
    return scene.chain.sample(scene.context, row)


def sample_without_decode(scene: Scene) -> int:
    return scene.chain.add_greedy().sample(scene.context, 0)


def sample_after_abort(scene: Scene) -> int:
    scene.chain.add_greedy()
    abort_decode(scene)
    return scene.chain.sample(scene.context, 0)


def sample_row_of_refilled_batch(scene: Scene) -> int:
    """The rows that count are those of the decode, not those of the batch of now."""
    scene.chain.add_greedy()
    scene.decode(1)
    scene.batch.clear()
    scene.batch.add(0, [97] * 4, 1, n_outputs=4)
    return scene.chain.sample(scene.context, 3)


def sample_poisoned_row(scene: Scene, value: float) -> int:
    scene.chain.add_dist(1)
    scene.decode().rows[:] = value
    return scene.chain.sample(scene.context, 3)


refuse(
    "logits of a decode before the last", rows_after_later_decode, "logits of decode 1",
    "decode 2", error=StaleLogitsError,
)  # fmt: skip
refuse(
    "logits after a decode without room", rows_after_refusal_by_llama, "logits of decode 4",
    "decode 5", error=StaleLogitsError,
)  # fmt: skip
refuse(
    "logits after an aborted decode", lambda s: abort_decode(s).rows, "logits of decode 1",
    "decode 2", error=StaleLogitsError,
)  # fmt: skip
refuse(
    "sampling before the first decode", sample_without_decode, "no successful decode",
    error=StaleLogitsError,
)  # fmt: skip
refuse(
    "sampling after an aborted decode", sample_after_abort, "no successful decode",
    error=StaleLogitsError,
)  # fmt: skip
for bad_row in (-1, 4, INT_MAX, 3.0):
    refuse(f"sampling row {bad_row!r} of 4", sample_row, f"row is {bad_row!r}, must", row=bad_row)
refuse("sampling a row without logits", sample_row, "row is 0, must be an output row", row=0)
refuse(
    "sampling a row that the batch got after the decode", sample_row_of_refilled_batch,
    "row is 3, must be 0 to 0",
)  # fmt: skip
for poison in (NAN, -INF, INF):
    refuse(
        f"sampling a row that is {poison}", sample_poisoned_row, f"logits is {poison}, must be",
        value=poison,
    )  # fmt: skip


# --- 1.2 Contexts ----------------------------------------------------------------------------
def make_context(scene: Scene, **parameters: Any) -> Context:
    scene.context  # noqa: B018
    return scene.new_context(**parameters)


BAD_CONTEXT: list[tuple[dict[str, Any], str]] = [
    *[({"n_seq_max": n}, f"n_seq_max is {n!r}, must be") for n in (0, -1, 257, 2**32 - 1, 4.0, "4")],
    *[({"n_ctx": n}, f"n_ctx is {n}, must be 0 to ") for n in (-1, 10**9, 2**32 - 1, 2**32)],
    ({"n_ctx": 3}, "n_ctx is 3, must be at least n_seq_max (4)"),
    ({"n_ctx": 256.0}, "n_ctx is 256.0, must be an integer"),
    *[({"n_batch": n}, f"n_batch is {n}, must be 4 to ") for n in (3, 0, -1, 2**31, 2**32)],
    *[({"n_ubatch": n}, f"n_ubatch is {n}, must be 1 to ") for n in (0, -1, 2**31, 2**32)],
    *[({"n_outputs_max": n}, f"n_outputs_max is {n}, must be 4 to 64") for n in (0, 3, 65, 2**32)],
    *[
        ({field_: bad}, f"{field_} is {bad!r}, must be one of f32, f16")
        for field_ in ("type_k", "type_v")
        for bad in ("q9", "i8", "q4_2", "F16", 99, 4, None)
    ],
    *[
        ({field_: n}, f"{field_} is {n}, must be 1 to 512")
        for field_ in ("n_threads", "n_threads_batch")
        for n in (0, -1, 100_000, 2**32)
    ],
    *[
        ({field_: bad}, f"{field_} is {bad!r}, must be")
        for field_ in (
            "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor",
            "yarn_beta_fast", "yarn_beta_slow",
        )
        for bad in (NAN, INF, -2.0, 1e39)
    ],
    ({"rope_freq_base": 1e-40}, "rope_freq_base is 1e-40, must be"),
    ({"rope_scaling": "yarn", "rope_freq_scale": 1e-40}, "rope_freq_scale is 1e-40, must be"),
    *[({"rope_scaling": bad}, f"rope_scaling is {bad!r}, must be one of") for bad in (99, -2, "q")],
    *[({"yarn_orig_ctx": n}, f"yarn_orig_ctx is {n}, must be 0 to ") for n in (-1, 2**31)],
    *[({"flash_attn": bad}, f"flash_attn is {bad!r}, must be") for bad in ("yes", 2)],
]  # fmt: skip
for bad_parameters, message in BAD_CONTEXT:
    shown = ", ".join(f"{name}={value!r}" for name, value in bad_parameters.items())
    refuse(f"a context with {shown}", make_context, message, **bad_parameters)
refuse(
    "a quantized V cache without flash attention", make_context, "flash_attn",
    error=ContextError, type_v="q8_0", flash_attn=False,
)  # fmt: skip
for n_threads in (0, -1, 513, 100_000, "1"):
    refuse(
        f"set_threads({n_threads!r})", lambda s, n: s.context.set_threads(1, n),
        f"n_threads_batch is {n_threads!r}, must be", n=n_threads,
    )  # fmt: skip
refuse(
    "a context of a model without weights",
    lambda s: Context(Model(s.path, vocab_only=True), **SMALL), "vocab_only", error=ContextError,
)  # fmt: skip
for encoder in ("tiny-encoder", "tiny-t5-encoder"):
    refuse(
        f"a context of {encoder}",
        lambda s, name: Context(Model(make_model.ensure(name, "F16")), **SMALL),
        "cannot generate text", error=ContextError, name=encoder,
    )  # fmt: skip


# --- 1.2, 1.3 Model files --------------------------------------------------------------------
def load(scene: Scene, name: str, content: bytes | None = None) -> Model:
    return Model(scene.file(name, content) if content is not None else scene.directory / name)


def load_fifo(scene: Scene) -> Model:
    os.mkfifo(scene.directory / "fifo.gguf")
    return load(scene, "fifo.gguf")


def load_truncated(scene: Scene, fraction: float) -> Model:
    whole = scene.path.read_bytes()
    return load(scene, "cut.gguf", whole[: int(fraction * len(whole))])


def refuse_model(claim: str, act: Callable[..., object], *says: str, **bound: Any) -> None:
    refuse(f"a model path that is {claim}", act, *says, error=ModelLoadError, **bound)


refuse_model("missing", load, "/none.gguf", "No such file", name="none.gguf")
refuse_model("empty", lambda _: Model(""), "cannot load ''")
refuse_model("a directory", load, "cannot load '/", "not a regular file", name=".")
refuse_model("a FIFO", load_fifo, "/fifo.gguf", "not a regular file")
refuse_model("/dev/null", lambda _: Model("/dev/null"), "'/dev/null'", "not a regular file")
refuse_model("/dev/zero", lambda _: Model("/dev/zero"), "'/dev/zero'", "not a regular file")
refuse_model("an empty file", load, "/e.gguf", "not a GGUF file", name="e.gguf", content=b"")
refuse_model("a text file", load, "/t.gguf", "b'once'", name="t.gguf", content=b"once upon a time")
refuse_model("text with NUL", lambda _: Model("a\0b"), "'a\\x00b'", "NUL")
refuse_model("text with a lone surrogate", lambda _: Model("\ud800.gguf"), "\\ud800")
refuse_model("longer than the system allows", lambda _: Model("x" * 5000), "too long")
refuse_model("only a magic", load, "/m.gguf", name="m.gguf", content=b"GGUF")
refuse_model(
    "a header of 2**64-1 tensors", load, "/h.gguf", name="h.gguf",
    content=b"GGUF" + b"\3\0\0\0" + b"\xff" * 16,
)  # fmt: skip
for fraction in (0.0001, 0.01, 0.05, 0.2, 0.5, 0.99):
    refuse_model(f"cut at {fraction:%}", load_truncated, "/cut.gguf", fraction=fraction)
refuse(
    "n_gpu_layers -2", lambda s: Model(s.path, n_gpu_layers=-2), "n_gpu_layers is -2, must be -1 to"
)


# --- 1.4 Memory ------------------------------------------------------------------------------
def call_memory(scene: Scene, method: str, args: tuple[Any, ...], split: bool = False) -> object:
    """After four tokens of sequence 0."""
    context = scene.split_decoded() if split else scene.decoded()
    return getattr(context, method)(*args)


for bad_seq in (-1, 4, 256, 2**31):
    expected = f"is {bad_seq!r}, must be"
    for method, extra in (
        ("seq_rm", ()), ("seq_keep", ()), ("seq_pos_min", ()), ("seq_pos_max", ()),
        ("seq_add", (0, None, 1)), ("state_seq_get_data", ()),
    ):  # fmt: skip
        refuse(
            f"{method} of sequence {bad_seq!r}", call_memory, f"seq_id {expected}", method=method,
            args=(bad_seq, *extra),
        )  # fmt: skip
        refuse(
            f"{method} of sequence {bad_seq!r} (per-sequence layout)", call_memory,
            f"seq_id {expected}", method=method, args=(bad_seq, *extra), split=True,
        )  # fmt: skip
    refuse(
        f"seq_cp from sequence {bad_seq!r}", call_memory, f"seq_id_src {expected}", method="seq_cp",
        args=(bad_seq, 1),
    )  # fmt: skip
    refuse(
        f"seq_cp to sequence {bad_seq!r}", call_memory, f"seq_id_dst {expected}", method="seq_cp",
        args=(0, bad_seq),
    )  # fmt: skip
for bad_range, message in (
    ((3, 1), "p1 is 1, must be 4 to"),
    ((0, 0), "p1 is 0, must be 1 to"),
    ((None, 0), "p1 is 0, must be 1 to"),
    ((-1, None), "p0 is -1, must be 0 to"),
    ((0, -1), "p1 is -1, must be 1 to"),
    ((0, 2**31), f"p1 is {2**31}, must be 1 to {INT_MAX}"),
    ((2**31, None), f"p0 is {2**31}, must be 0 to"),
    ((0.0, None), "p0 is 0.0, must be an integer"),
):
    refuse(
        f"seq_rm of positions {bad_range}", call_memory, message, method="seq_rm",
        args=(0, *bad_range),
    )  # fmt: skip
refuse(
    "seq_cp onto itself", call_memory, "seq_id_dst is 0, must be another", method="seq_cp",
    args=(0, 0),
)  # fmt: skip


def copy_onto_occupied(scene: Scene, *, split: bool) -> None:
    context = scene.split if split else scene.context
    scene.decode(seq_id=0, context=context)
    scene.decode(seq_id=1, context=context)
    context.seq_cp(0, 1)


for is_split in (False, True):
    refuse(
        f"seq_cp onto an occupied sequence{' (per-sequence layout)' * is_split}",
        copy_onto_occupied, "seq_id_dst is 1, must be an empty sequence", split=is_split,
    )  # fmt: skip
for bad_range in ((0, 2), (1, None), (2, 4)):
    refuse(
        f"seq_cp of positions {bad_range} (per-sequence layout)", call_memory,
        f"[p0, p1) is {bad_range}, must be everything", method="seq_cp", args=(0, 1, *bad_range),
        split=True,
    )  # fmt: skip


def read_pending_copy(scene: Scene) -> None:
    """In the per-sequence layout the copy is made by the next decode."""
    context = scene.split_decoded()
    context.seq_cp(0, 1)
    context.state_seq_get_data(1)


def restore_beside_pending_copy(scene: Scene, seq_id: int) -> None:
    context = scene.split_decoded()
    data = context.state_seq_get_data(0)
    context.seq_cp(0, 1)
    context.seq_rm(seq_id)
    context.state_seq_set_data(data, seq_id, n_positions=4)


refuse(
    "reading the state of a copy that was not made yet", read_pending_copy, "seq_id is 1, must be"
)
for bad_seq in (0, 1):
    refuse(
        f"a state into sequence {bad_seq} of a copy that was not made yet",
        restore_beside_pending_copy, f"seq_id is {bad_seq}, must be", seq_id=bad_seq,
    )  # fmt: skip

for bad_shift, message in (
    ((0, None, -1), "shifted position is -1, must be 0 to 255"),
    ((2, None, 253), "shifted position is 256, must be 0 to 255"),
    ((0, None, INT_MAX), f"delta is {INT_MAX}, must be -256 to 256"),
    ((0, None, -(2**31)), f"delta is {-(2**31)}, must be -256 to 256"),
    ((0, None, 1.0), "delta is 1.0, must be an integer"),
    ((2, 2, 1), "p1 is 2, must be 3 to"),
):
    refuse(f"seq_add of {bad_shift}", call_memory, message, method="seq_add", args=(0, *bad_shift))


# --- 1.5 Samplers ----------------------------------------------------------------------------
def candidates(*logits: float, ids: list[int] | None = None) -> Candidates:
    all_ids = np.array(range(len(logits)) if ids is None else ids, np.int32)
    return Candidates(all_ids, np.array(logits, np.float32))


def add_sampler(scene: Scene, method: str, arguments: dict[str, Any]) -> None:
    scene.context  # noqa: B018
    getattr(scene.chain, method)(**arguments)


def sample_with(scene: Scene, build: Callable[[SamplerChain], object]) -> int:
    build(scene.chain)
    scene.decode()
    return scene.chain.sample(scene.context, 3)


def apply_to(scene: Scene, build: Callable[[SamplerChain], object], data: Candidates) -> int:
    build(scene.chain)
    return scene.chain.apply(data)


refuse("sampling with an empty chain", sample_with, "chain is ()", build=lambda c: c)
refuse("applying an empty chain", apply_to, "chain is ()", build=lambda c: c, data=candidates(1, 2))
for what, build in (
    ("sampling", sample_with),
    ("applying", lambda s, build: apply_to(s, build, candidates(1, 2))),
):
    refuse(
        f"{what} a chain that selects nothing", build, "chain is ('top-k',)",
        "ends in a selecting sampler", build=lambda c: c.add_top_k(3),
    )  # fmt: skip
refuse(
    "a sampler after the one that selects", lambda s: s.chain.add_greedy().add_top_k(3),
    "sampler is 'greedy', must be the last",
)  # fmt: skip
refuse(
    "a second sampler that selects", lambda s: s.chain.add_dist(1).add_greedy(),
    "sampler is 'dist', must be the last",
)  # fmt: skip
refuse("no candidates", lambda _: candidates(), "candidates is 0, must be at least one")
refuse(
    "candidates with fewer logits than ids", lambda _: candidates(1.0, ids=[1, 2]),
    "candidates is 2, must be",
)  # fmt: skip
for bad_logits in ((NAN, NAN), (-INF, -INF), (INF, 1.0), (1.0, NAN)):
    refuse(
        f"applying to the logits {bad_logits}", apply_to, "logits is ", "finite",
        build=lambda c: c.add_dist(1), data=candidates(*bad_logits),
    )  # fmt: skip
for bad_id in (-1, N_VOCAB, 10**9):
    refuse(
        f"applying greedy to candidate {bad_id}", apply_to, f"is {bad_id}, must be 0 to 259",
        build=lambda c: c.add_greedy(), data=candidates(1.0, 0.0, ids=[bad_id, 5]),
    )  # fmt: skip
    refuse(
        f"applying infill to candidate {bad_id}", apply_to, f"is {bad_id}, must be 0 to 259",
        build=lambda c: c.add_infill().add_greedy(), data=candidates(1.0, 0.0, ids=[bad_id, 5]),
    )  # fmt: skip
refuse(
    "a bias that bans every token", apply_to, "candidates", "finite",
    build=lambda c: c.add_logit_bias({0: -INF, 1: -INF}).add_dist(1), data=candidates(1.0, 2.0),
)  # fmt: skip
for large_bias in (1e37, 3e38):
    refuse(
        f"a bias of {large_bias:g}, which a temperature can make infinite", add_sampler,
        f"logit_bias is {large_bias}, must be", method="add_logit_bias",
        arguments={"biases": {5: large_bias}},
    )  # fmt: skip

GOOD: dict[str, dict[str, Any]] = {
    "add_dist": {"seed": 1},
    "add_mirostat": {"seed": 1, "tau": 5.0, "eta": 0.1, "m": 100},
    "add_mirostat_v2": {"seed": 1, "tau": 5.0, "eta": 0.1},
    "add_adaptive_p": {"target": 0.5, "decay": 0.9, "seed": 1},
    "add_top_k": {"k": 40},
    "add_top_p": {"p": 0.9, "min_keep": 1},
    "add_min_p": {"p": 0.1, "min_keep": 1},
    "add_typical": {"p": 0.9, "min_keep": 1},
    "add_temp": {"temperature": 0.8},
    "add_temp_ext": {"temperature": 0.8, "delta": 0.3, "exponent": 1.0},
    "add_xtc": {"probability": 0.5, "threshold": 0.1, "min_keep": 1, "seed": 1},
    "add_top_n_sigma": {"n": 1.0},
    "add_penalties": {"last_n": 64, "repeat": 1.1, "frequency": 0.1, "presence": 0.1},
    "add_dry": {"multiplier": 0.8, "base": 1.75, "allowed_length": 2, "last_n": 64},
}
BAD_PER_TYPE: dict[type, tuple[Any, ...]] = {
    float: (NAN, INF, 1e39, "1"),
    int: (-2, 2**32, 1.5, "1"),
}
for method, good in GOOD.items():
    for parameter, good_value in good.items():
        for bad in BAD_PER_TYPE[type(good_value)]:
            refuse(
                f"{method}({parameter}={bad!r})", add_sampler, f" is {bad!r}, must be",
                method=method, arguments={**good, parameter: bad},
            )  # fmt: skip
for method, arguments, message in (
    ("add_dist", {"seed": 2**32 - 1}, f"seed is {2**32 - 1}, must be 0 to {2**32 - 2}"),
    ("add_temp", {"temperature": 1e-40}, "temperature is 1e-40, must be 0 or at least 0.001"),
    ("add_temp", {"temperature": -0.5}, "temperature is -0.5, must be 0 to"),
    ("add_top_p", {"p": 1.5}, "top_p is 1.5, must be 0 to 1"),
    ("add_min_p", {"p": -0.1}, "min_p is -0.1, must be 0 to 1"),
    ("add_top_p", {"p": 0.5, "min_keep": -1}, "min_keep is -1, must be 0 to 260"),
    ("add_top_p", {"p": 0.5, "min_keep": 261}, "min_keep is 261, must be 0 to 260"),
    ("add_mirostat", {**GOOD["add_mirostat"], "m": 0}, "mirostat_m is 0, must be 1 to 260"),
    ("add_mirostat", {**GOOD["add_mirostat"], "m": 261}, "mirostat_m is 261, must be 1 to 260"),
    ("add_adaptive_p", {**GOOD["add_adaptive_p"], "decay": 1.0}, "adaptive_decay is 1.0, must be"),
    ("add_penalties", {"last_n": INT_MAX}, f"repeat_last_n is {INT_MAX}, must be 0 to"),
    ("add_penalties", {"last_n": 5 * 10**8}, f"repeat_last_n is {5 * 10**8}, must be 0 to"),
    ("add_penalties", {"last_n": -1}, "repeat_last_n is -1, must be 0 to"),
    ("add_penalties", {"last_n": 64, "repeat": 0.0}, "repeat_penalty is 0.0, must be 0.001 to"),
    ("add_dry", {**GOOD["add_dry"], "last_n": INT_MAX}, f"dry_penalty_last_n is {INT_MAX}, must"),
    ("add_dry", {**GOOD["add_dry"], "sequence_breakers": ["a"] * 257},
     "dry_sequence_breakers is 257, must be 0 to 256"),
    ("add_dry", {**GOOD["add_dry"], "sequence_breakers": ["a\0"]}, "is 'a\\x00', must be"),
    ("add_dry", {**GOOD["add_dry"], "sequence_breakers": ["\ud800"]}, "is '\\ud800', must be"),
    ("add_dry", {**GOOD["add_dry"], "sequence_breakers": [b"a"]}, "is b'a', must be a str"),
    ("add_logit_bias", {"biases": {-1: 1.0}}, "token is -1, must be 0 to 259"),
    ("add_logit_bias", {"biases": {5: 1.0, N_VOCAB: 1.0}}, "token is 260, must be 0 to 259"),
    ("add_logit_bias", {"biases": {10**9: 1.0}}, f"token is {10**9}, must be 0 to 259"),
    ("add_logit_bias", {"biases": {"5": 1.0}}, "token is '5', must be an integer"),
    ("add_logit_bias", {"biases": {5: NAN}}, "logit_bias is nan, must be finite"),
    ("add_logit_bias", {"biases": {5: INF}}, "logit_bias is inf, must be finite"),
    ("add_logit_bias", {"biases": {5: "1"}}, "logit_bias is '1', must be a number"),
):  # fmt: skip
    refuse(
        f"{method}({str(arguments)[1:120]})", add_sampler, message, method=method,
        arguments=arguments,
    )  # fmt: skip
for bad_token in (-1, N_VOCAB, 10**9, 1.0):
    refuse(
        f"a chain's accept of token {bad_token!r}",
        lambda s, token: s.chain.add_penalties(64, 1.1).add_greedy().accept(token),
        f"token is {bad_token!r}, must be", token=bad_token,
    )  # fmt: skip


# --- 1.6 Grammar: what a grammar of your own can do ------------------------------------------
def make_grammar(scene: Scene, text: Any, root: Any = "root") -> None:
    scene.context  # noqa: B018
    Grammar(scene.vocab, text, root)


for bad_text in ("", 'root ::= "a', "root ::= nope", "root ::= (", "once upon"):
    refuse(f"the grammar {bad_text!r}", make_grammar, f"grammar is {bad_text!r}", text=bad_text)
refuse("a grammar without its root", make_grammar, "grammar is", text='root ::= "a"', root="nope")
refuse("a grammar with NUL", make_grammar, "NUL", text='root ::= "a\0"')
refuse("a grammar of bytes", make_grammar, "is b'', must be a str", text=b"")
refuse("a root that is None", make_grammar, "root is None", text='root ::= "a"', root=None)
refuse(
    "a grammar's accept of a forbidden token", lambda s: s.grammar.accept(ord("x")),
    f"token is {ord('x')}, must be one that the grammar allows",
)  # fmt: skip
refuse(
    "a grammar's accept of the end before it is complete", lambda s: s.grammar.accept(257),
    "token is 257, must be one that the grammar allows",
)  # fmt: skip
for bad_token in (-1, N_VOCAB, 10**9):
    refuse(
        f"a grammar's accept of token {bad_token}", lambda s, token: s.grammar.accept(token),
        f"token is {bad_token}, must be 0 to 259", token=bad_token,
    )  # fmt: skip
    refuse(
        f"a grammar applied to candidate {bad_token}",
        lambda s, token: s.grammar.apply(candidates(1.0, 2.0, ids=[5, token])),
        f"is {bad_token}, must be 0 to 259", token=bad_token,
    )  # fmt: skip


# --- 1.7 Vocabulary --------------------------------------------------------------------------
for bad_token in (-1, N_VOCAB, 10**9, 2**32, 1.0):
    for method in (
        "token_to_piece", "piece", "is_eog", "is_control", "text", "score", "attributes",
        "check_token",
    ):  # fmt: skip
        refuse(
            f"{method} of token {bad_token!r}",
            lambda s, method, token: getattr(s.vocab, method)(token),
            f"token is {bad_token!r}, must be", method=method, token=bad_token,
        )  # fmt: skip
    refuse(
        f"detokenizing token {bad_token!r}", lambda s, token: s.vocab.detokenize([5, token]),
        f"token is {bad_token!r}, must be", token=bad_token,
    )  # fmt: skip
refuse(
    "a text of more than 1 MiB", lambda s: s.vocab.tokenize("a" * (2**20 + 1)),
    f"{2**20 + 1} bytes", f"at most {2**20} bytes",
)  # fmt: skip
refuse(
    "a text of more than 1 MiB in UTF-8 only", lambda s: s.vocab.tokenize("é" * (2**19 + 1)),
    f"{2**20 + 2} bytes", f"at most {2**20} bytes",
)  # fmt: skip
for bad_text_, message in (
    ("a\ud800b", "text is '\\ud800', must be"),
    (b"bytes", "text is b'bytes', must be a str"),
    (b"\xf4\x90\x80\x80", "text is b'\\xf4\\x90\\x80\\x80', must be a str"),
    (None, "text is None, must be a str"),
    (5, "text is 5, must be a str"),
):
    refuse(
        f"tokenizing {bad_text_!r}", lambda s, text: s.vocab.tokenize(text), message, text=bad_text_
    )


def apply_template(scene: Scene, message: dict[str, Any]) -> str:
    return scene.model.apply_chat_template([message])


for bad_text_ in ("a\0b", "\ud800", b"a", None, 5):
    for key in ("role", "content"):
        refuse(
            f"a chat message with {key} {bad_text_!r}", apply_template,
            f"{key} is {bad_text_!r}, must be", message={"role": "user", "content": "hi", key: bad_text_},
        )  # fmt: skip
for key in ("role", "content"):
    refuse(
        f"a chat message without {key}", apply_template, key,
        message={name: "hi" for name in ("role", "content") if name != key},
    )  # fmt: skip
refuse("a template name with NUL", lambda s: s.model.chat_template("a\0"), "name is 'a\\x00', must")
refuse("a metadata key with NUL", lambda s: s.model.metadata_value("a\0"), "key is 'a\\x00', must")


# --- 1.8 State blobs -------------------------------------------------------------------------
def restore(
    scene: Scene,
    change: Callable[[bytes], Any],
    *,
    n_positions: Any = 4,
    seq_id: Any = 1,
    split: bool = False,
) -> None:
    context = scene.split_decoded() if split else scene.decoded()
    data = context.state_seq_get_data(0)
    try:
        context.state_seq_set_data(change(data), seq_id, n_positions=n_positions)
    except LlamaCallError:
        assert context.seq_pos_max(1) is None, "the refused copy left something in the sequence"
        raise


def same(data: bytes) -> bytes:
    return data


for is_split in (False, True):
    suffix = " (per-sequence layout)" * is_split
    refuse(
        f"an empty state{suffix}", restore, "data is b'', must be", change=lambda _: b"",
        split=is_split,
    )  # fmt: skip
    for cut in (1, 4, 8, 12, 16, 40, 100, 1000, -1):
        refuse(
            f"a state cut at {cut} bytes{suffix}", restore, "llama_state_seq_set_data returned",
            error=LlamaCallError, change=lambda data, cut=cut: data[:cut], split=is_split,
        )  # fmt: skip
    for name, garbage in (("zeros", b"\0" * 999), ("ones", b"\xff" * 999), ("text", b"once " * 99)):
        refuse(
            f"a state of {name}{suffix}", restore, "llama_state_seq_set_data returned",
            error=LlamaCallError, change=lambda _, garbage=garbage: garbage, split=is_split,
        )  # fmt: skip
    for n_positions in (3, 5):
        refuse(
            f"a state of 4 positions said to have {n_positions}{suffix}", restore,
            "llama_state_seq_set_data returned", "restored positions (0, 3)", error=LlamaCallError,
            change=same, n_positions=n_positions, split=is_split,
        )  # fmt: skip
    refuse(
        f"a state into an occupied sequence{suffix}", restore,
        "seq_id is 0, must be an empty sequence", change=same, seq_id=0, split=is_split,
    )  # fmt: skip
    for bad_seq in (-1, 4, 256):
        refuse(
            f"a state into sequence {bad_seq}{suffix}", restore,
            f"seq_id is {bad_seq}, must be 0 to 3", change=same, seq_id=bad_seq, split=is_split,
        )  # fmt: skip
refuse(
    "a state followed by more bytes", restore, "llama_state_seq_set_data returned",
    error=LlamaCallError, change=lambda data: data + b"\0",
)  # fmt: skip
for n_positions in (0, -1, 257, 4.0):
    refuse(
        f"a state said to have {n_positions!r} positions", restore,
        f"n_positions is {n_positions!r}, must be", change=same, n_positions=n_positions,
    )  # fmt: skip
refuse("a state that is a str", restore, "data is 'abc', must be", change=lambda _: "abc")


# --- 1.9 LoRA --------------------------------------------------------------------------------
def load_lora(scene: Scene, path: Path | str) -> None:
    scene.context  # noqa: B018
    LoraAdapter(scene.model, path)


def apply_lora(scene: Scene, scale: Any) -> None:
    scene.context.set_loras([(LoraAdapter(scene.model, scene.lora()), scale)])


def close_applied_lora(scene: Scene) -> None:
    adapter = LoraAdapter(scene.model, scene.lora())
    scene.context.set_loras([(adapter, 1.0)])
    adapter.close()
    scene.decode()


def apply_foreign_lora(scene: Scene) -> None:
    """The other model has matrices of the same names and other shapes."""
    adapter = LoraAdapter(scene.model, scene.lora())
    with Context(Model(make_model.ensure("tiny-hybrid", "F16")), **SMALL) as context:
        context.set_loras([(adapter, 1.0)])
        scene.decode(context=context)


def apply_closed_lora(scene: Scene) -> None:
    adapter = LoraAdapter(scene.model, scene.lora())
    adapter.close()
    scene.context.set_loras([(adapter, 1.0)])


refuse("a missing LoRA", load_lora, "/none.gguf", error=ModelLoadError, path="/tmp/none.gguf")
refuse(
    "a LoRA file of garbage", lambda s: load_lora(s, s.file("l.gguf", b"GGUF" + b"\7" * 999)),
    "/l.gguf", error=ModelLoadError,
)  # fmt: skip
refuse("a model file as LoRA", lambda s: load_lora(s, s.path), "tiny-llama", error=ModelLoadError)
for scale in (NAN, INF, 1e39, "1"):
    refuse(f"a LoRA scale of {scale!r}", apply_lora, f"scale is {scale!r}, must be", scale=scale)
refuse("closing a LoRA that is applied", close_applied_lora, "LoraAdapter", error=InUseError)
refuse("a LoRA of another model", apply_foreign_lora, "adapter")
refuse("a LoRA that is closed", apply_closed_lora, "LoraAdapter is closed", error=ClosedError)


# --- 1.9 Lifetime ----------------------------------------------------------------------------
CONTEXT_CALLS: dict[str, Callable[[Scene, Context], object]] = {
    "decode": lambda s, c: c.decode(s.batch),
    "seq_rm": lambda _, c: c.seq_rm(0),
    "seq_cp": lambda _, c: c.seq_cp(0, 1),
    "seq_keep": lambda _, c: c.seq_keep(0),
    "seq_add": lambda _, c: c.seq_add(0, 0, None, 1),
    "seq_pos_min": lambda _, c: c.seq_pos_min(0),
    "seq_pos_max": lambda _, c: c.seq_pos_max(0),
    "can_shift": lambda _, c: c.can_shift,
    "memory_clear": lambda _, c: c.memory_clear(),
    "state_seq_get_data": lambda _, c: c.state_seq_get_data(0),
    "state_seq_set_data": lambda _, c: c.state_seq_set_data(b"x", 1, n_positions=1),
    "set_threads": lambda _, c: c.set_threads(1, 1),
    "threads": lambda _, c: c.threads,
    "set_loras": lambda _, c: c.set_loras([]),
    "perf": lambda _, c: c.perf(),
    "perf_reset": lambda _, c: c.perf_reset(),
    "sample": lambda s, c: s.chain.sample(c, 3),
    "logits": lambda s, _: s.__dict__["logits"].rows,
}


def call_context(
    scene: Scene, call: str, run: Callable[[Callable[[], object]], None], close: bool = False
) -> None:
    context = scene.context
    scene.chain.add_greedy()
    scene.__dict__["logits"] = scene.decode()
    if close:
        context.close()
        context.close()  # twice is allowed
    run(lambda: CONTEXT_CALLS[call](scene, context))


def here(action: Callable[[], object]) -> None:
    action()


for call in CONTEXT_CALLS:
    refuse(
        f"{call} of a closed context", call_context, "Context is closed", error=ClosedError,
        call=call, run=here, close=True,
    )  # fmt: skip
    refuse(
        f"{call} from another thread", call_context, "belongs to thread", "called from",
        error=WrongThreadError, call=call, run=in_thread,
    )  # fmt: skip
    refuse(
        f"{call} in a forked child", call_context, "before a fork", error=WrongProcessError,
        call=call, run=in_fork,
    )  # fmt: skip


def closed_model(scene: Scene) -> Model:
    scene.model.close()
    scene.model.close()  # twice is allowed
    return scene.model


MODEL_CALLS: dict[str, Callable[[Scene], object]] = {
    "a context": lambda s: s.new_context(),
    "a chain": lambda s: SamplerChain(s.model.vocab),
    "a grammar": lambda s: Grammar(s.model.vocab, 'root ::= "a"'),
    "a LoRA": lambda s: LoraAdapter(s.model, s.path),
    "the description": lambda s: s.model.description,
    "the metadata": lambda s: s.model.metadata,
    "a metadata value": lambda s: s.model.metadata_value("general.name"),
    "the chat template": lambda s: s.model.chat_template(),
    "tokenize": lambda s: s.model.vocab.tokenize("a"),
    "detokenize": lambda s: s.model.vocab.detokenize([5]),
    "token_to_piece": lambda s: s.model.vocab.token_to_piece(5),
    "is_eog": lambda s: s.model.vocab.is_eog(5),
    "is_control": lambda s: s.model.vocab.is_control(5),
    "the text of a token": lambda s: s.model.vocab.text(5),
    "the score of a token": lambda s: s.model.vocab.score(5),
    "the attributes of a token": lambda s: s.model.vocab.attributes(5),
}


def call_model(
    scene: Scene, call: str, run: Callable[[Callable[[], object]], None], close: bool = False
) -> None:
    if close:
        closed_model(scene)
    else:
        scene.model  # noqa: B018
    run(lambda: MODEL_CALLS[call](scene))


for call in MODEL_CALLS:
    refuse(
        f"{call} of a closed model", call_model, "Model is closed", error=ClosedError, call=call,
        run=here, close=True,
    )  # fmt: skip
    refuse(
        f"{call} of a model in a forked child", call_model, "before a fork",
        error=WrongProcessError, call=call, run=in_fork,
    )  # fmt: skip
for call in ("a context", "the description", "the metadata", "the chat template"):
    refuse(
        f"{call} of a model from another thread", call_model, "belongs to thread",
        error=WrongThreadError, call=call, run=in_thread,
    )  # fmt: skip

CHAIN_CALLS: dict[str, Callable[[Scene], object]] = {
    "add_greedy": lambda s: SamplerChain.add_greedy(s.chain),
    "add_dry": lambda s: s.chain.add_dry(0.8, 1.75, 2, 64),
    "apply": lambda s: s.chain.apply(candidates(1.0, 2.0)),
    "accept": lambda s: s.chain.accept(5),
    "sample": lambda s: s.chain.sample(s.context, 3),
    "reset": lambda s: s.chain.reset(),
    "clone": lambda s: s.chain.clone(),
    "names": lambda s: s.chain.names,
    "perf": lambda s: s.chain.perf,
}


def call_chain(
    scene: Scene, call: str, run: Callable[[Callable[[], object]], None], close: bool = False
) -> None:
    if call not in ("add_greedy", "add_dry"):
        scene.chain.add_greedy()
    scene.decode()
    scene.chain.names  # noqa: B018
    if close:
        scene.chain.close()
        scene.chain.close()
    run(lambda: CHAIN_CALLS[call](scene))


for call in CHAIN_CALLS:
    refuse(
        f"{call} of a closed chain", call_chain, "SamplerChain is closed", error=ClosedError,
        call=call, run=here, close=True,
    )  # fmt: skip
    refuse(
        f"{call} of a chain from another thread", call_chain, "belongs to thread",
        error=WrongThreadError, call=call, run=in_thread,
    )  # fmt: skip
for call_, use in (
    ("apply", lambda s: s.grammar.apply(candidates(1.0, 2.0))),
    ("accept", lambda s: s.grammar.accept(ord("a"))),
    ("allows", lambda s: s.grammar.allows(ord("a"))),
):
    refuse(
        f"{call_} of a closed grammar", lambda s, use: (s.grammar.close(), use(s)),
        "Grammar is closed", error=ClosedError, use=use,
    )  # fmt: skip


def close_in_use(scene: Scene, child: Callable[[Scene], object]) -> None:
    kept = child(scene)
    try:
        scene.model.close()
    finally:
        assert kept is not None
        assert not scene.model.closed


for name, child in (
    ("context", lambda s: s.context),
    ("chain", lambda s: s.chain),
    ("grammar", lambda s: s.grammar),
    ("LoRA", lambda s: LoraAdapter(s.model, s.lora())),
):
    refuse(
        f"closing a model with an open {name}", close_in_use, "has 1 open", error=InUseError,
        child=child,
    )  # fmt: skip
for name, child in (("context", lambda s: s.context), ("chain", lambda s: s.chain)):
    refuse(
        f"closing a {name} from another thread", lambda s, child: in_thread(child(s).close),
        "belongs to thread", error=WrongThreadError, child=child,
    )  # fmt: skip
    refuse(
        f"closing a {name} in a forked child", lambda s, child: in_fork(child(s).close),
        "before a fork", error=WrongProcessError, child=child,
    )  # fmt: skip


# --- The process that runs the cases ---------------------------------------------------------
def run_case(case: Case, scene: Scene) -> dict[str, str]:
    """What the case raised; for the sign of life that failed, what that raised."""
    try:
        returned = case.act(scene)
    except Exception as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    else:
        return {"error": "", "message": f"returned {returned!r}"[:500]}
    try:
        scene.check_alive()
    except Exception as error:
        answer["afterwards"] = repr(error)
    return answer


def serve(model_path: Path, directory: Path) -> None:
    """One line in: the number of a case and a directory for it.  One line out: what happened."""
    gc.freeze()
    for line in sys.stdin:
        index = int(line)
        case_directory = directory / str(index)
        case_directory.mkdir()
        answer = case_directory / "answer.json"
        pid = os.fork()
        if pid == 0:
            signal.alarm(TIME_LIMIT_S)
            outcome = run_case(CASES[index], Scene(model_path, case_directory))
            answer.write_text(json.dumps(outcome))
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        outcome = json.loads(answer.read_text()) if answer.exists() else {}
        if os.WIFSIGNALED(status):
            outcome["died"] = signal.Signals(os.WTERMSIG(status)).name
        sys.stdout.write(json.dumps(outcome) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
