"""Cases of hazard table 1.4: sequences and positions of the KV cache, and copies before the next decode."""

from __future__ import annotations

from typing import Any

from tests.bindings.hazard_case import INT_MAX, Scene, Topic

TOPIC = Topic()
refuse = TOPIC.refuse
# Loop variable of this file; some of its values have a wrong type.
bad_seq: Any


def call_memory(scene: Scene, method: str, args: tuple[Any, ...], split: bool = False) -> object:
    """Call a method of a context whose sequence 0 has four tokens."""
    context = scene.split_decoded() if split else scene.decoded()
    return getattr(context, method)(*args)


for bad_seq in (-1, 4, 256, 2**31):
    expected = f"is {bad_seq!r}, must be"
    for method, extra in (
        ("seq_rm", ()), ("seq_pos_min", ()), ("seq_pos_max", ()),
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
    "seq_cp onto itself", call_memory, "seq_id_dst is 0, must be different from", method="seq_cp",
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
        f"[p0, p1) is {bad_range}, must be the whole sequence", method="seq_cp", args=(0, 1, *bad_range),
        split=True,
    )  # fmt: skip


def read_pending_copy(scene: Scene) -> None:
    """Read the state of a copy that, in the per-sequence layout, the next decode would make."""
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

CASES = TOPIC.cases
