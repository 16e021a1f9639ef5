"""Cases of hazard table 1.8: states that are cut, changed or forged, or that have a wrong destination."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from cllm.errors import LlamaCallError
from tests.bindings.hazard_case import Scene, Topic

TOPIC = Topic()
refuse = TOPIC.refuse
# Loop variables of this file; some of their values have a wrong type.
bad_seq: Any
n_positions: Any


CHANGED, NO_COPY = "must be unchanged: its checksum is wrong", "must be a copy made by"


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


def forged(data: bytes) -> bytes:
    """Return the data with a valid checksum, so that llama.cpp itself reads the damaged bytes."""
    name, cells = data[:8], data[12:]
    return name + zlib.crc32(cells).to_bytes(4, "little") + cells


for is_split in (False, True):
    suffix = " (per-sequence layout)" * is_split
    refuse(
        f"an empty state{suffix}", restore, "data is b'', must be", change=lambda _: b"",
        split=is_split,
    )  # fmt: skip
    for cut in (1, 4, 8, 12, 16, 40, 100, 1000, -1):
        refuse(
            f"a state cut at {cut} bytes{suffix}", restore, NO_COPY if 0 < cut <= 12 else CHANGED,
            change=lambda data, cut=cut: data[:cut], split=is_split,
        )  # fmt: skip
    for cut in (13, 16, 20, 24, 28, 52, 112, 1012, -1):
        refuse(
            f"a forged state cut at {cut} bytes{suffix}", restore,
            "llama_state_seq_set_data returned", error=LlamaCallError,
            change=lambda data, cut=cut: forged(data[:cut]), split=is_split,
        )  # fmt: skip
    for name, garbage in (("zeros", b"\0" * 999), ("ones", b"\xff" * 999), ("text", b"once " * 99)):
        refuse(
            f"a state of {name}{suffix}", restore, NO_COPY,
            change=lambda _, garbage=garbage: garbage, split=is_split,
        )  # fmt: skip
        refuse(
            f"a forged state of {name}{suffix}", restore, "llama_state_seq_set_data returned",
            error=LlamaCallError, change=lambda data, garbage=garbage: forged(data[:12] + garbage),
            split=is_split,
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
    "a state followed by more bytes", restore, CHANGED, change=lambda data: data + b"\0",
)  # fmt: skip
refuse(
    "a forged state followed by more bytes", restore, "llama_state_seq_set_data returned",
    error=LlamaCallError, change=lambda data: forged(data + b"\0"),
)  # fmt: skip
for n_positions in (0, -1, 257, 4.0):
    refuse(
        f"a state said to have {n_positions!r} positions", restore,
        f"n_positions is {n_positions!r}, must be", change=same, n_positions=n_positions,
    )  # fmt: skip
refuse("a state that is a str", restore, "data is 'abc', must be", change=lambda _: "abc")

CASES = TOPIC.cases
