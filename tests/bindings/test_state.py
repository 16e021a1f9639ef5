"""The state of one sequence: copied, restored, and refused where it was changed."""

from __future__ import annotations

import contextlib
import random
import zlib

import pytest

from cllm.bindings import Context
from cllm.errors import InvalidArgumentError, LlamaCallError
from tests.bindings.test_context import TEXT, close_to, decode


def test_a_restored_state_continues_like_the_original(context: Context) -> None:
    decode(context, 0, TEXT, 0)
    data = context.state_seq_get_data(0)
    expected = decode(context, 0, [98], len(TEXT))
    context.memory_clear()
    context.state_seq_set_data(data, 3, n_positions=len(TEXT))
    assert (context.seq_pos_min(3), context.seq_pos_max(3)) == (0, len(TEXT) - 1)
    assert close_to(decode(context, 3, [98], len(TEXT)), expected)


def test_the_state_of_an_empty_sequence_is_empty(context: Context) -> None:
    assert context.state_seq_get_data(1) == b""


def test_a_refused_state_leaves_the_sequence_empty_and_usable(context: Context) -> None:
    first = decode(context, 0, TEXT, 0)
    data = context.state_seq_get_data(0)
    with pytest.raises(LlamaCallError, match="restored positions"):
        context.state_seq_set_data(forge(data[:-1]), 1, n_positions=len(TEXT))
    assert context.seq_pos_max(1) is None
    assert close_to(decode(context, 1, TEXT, 0), first)


def forge(copy: bytes) -> bytes:
    """A changed copy whose checksum is right."""
    name, cells = copy[:8], copy[12:]
    return name + zlib.crc32(cells).to_bytes(4, "little") + cells


def test_a_changed_copy_is_refused_by_its_checksum(context: Context) -> None:
    first = decode(context, 0, TEXT, 0)
    data = context.state_seq_get_data(0)
    chance = random.Random(1)
    places = [*range(100), *chance.sample(range(len(data)), 400)]
    for place in places:
        copy = bytearray(data)
        copy[place] ^= 1 << chance.randrange(8)
        wrong = "a copy made by" if place < 8 else "unchanged: its checksum is wrong"
        with pytest.raises(InvalidArgumentError, match=f"data is .* must be {wrong}"):
            context.state_seq_set_data(bytes(copy), 1, n_positions=len(TEXT))
        wrong = "a copy made by" if place <= 12 else "unchanged: its checksum is wrong"
        with pytest.raises(InvalidArgumentError, match=f"data is .* must be {wrong}"):
            context.state_seq_set_data(data[: max(1, place)], 1, n_positions=len(TEXT))
    assert context.seq_pos_max(1) is None
    context.state_seq_set_data(data, 1, n_positions=len(TEXT))
    assert close_to(decode(context, 2, TEXT, 0), first)


def test_cells_that_a_forged_copy_hides_are_not_taken_for_an_empty_sequence(
    context: Context,
) -> None:
    """llama.cpp removes none at negative positions, and attends to them."""
    decode(context, 0, TEXT, 0)
    data = context.state_seq_get_data(0)
    for place in range(15, 200):  # the highest byte of the first position is among them
        copy = bytearray(data)
        copy[place] ^= 0x80
        with contextlib.suppress(LlamaCallError):
            context.state_seq_set_data(forge(bytes(copy)), 1, n_positions=len(TEXT))
            context.seq_rm(1)
        last = context.seq_pos_max(1)
        if last is not None:
            break
    assert last is not None
    assert last < -1
    with pytest.raises(InvalidArgumentError, match="seq_id is 1, must be an empty sequence"):
        context.state_seq_set_data(data, 1, n_positions=len(TEXT))
    context.memory_clear()
    assert context.seq_pos_max(1) is None
