"""Which decodes are aborted for a cancelled request, and which are not."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import pytest

from cllm.engine.thread.interrupter import MIN_ROWS, Interrupter


class Flag:
    """An abort flag."""

    is_set = False

    def abort(self) -> None:
        self.is_set = True

    def allow(self) -> None:
        self.is_set = False


@pytest.fixture
def flag() -> Flag:
    return Flag()


def interrupter(flag: Flag, *, can_truncate: bool = True) -> Interrupter:
    it = Interrupter()
    it.attach(flag, can_truncate=can_truncate)
    return it


@pytest.mark.parametrize(
    ("rows", "is_aborted"),
    [
        ({"long": 500, "other": 1}, True),
        ({"long": 500}, True),
        ({"long": 100, "other": 100}, False),
        ({"long": MIN_ROWS - 1}, False),
        ({"long": MIN_ROWS}, True),
        ({"other": 500}, False),
    ],
)
def test_a_decode_that_is_mostly_the_cancelled_ones_is_aborted(
    flag: Flag, rows: dict[str, int], is_aborted: bool
) -> None:
    it = interrupter(flag)
    it.begin(rows)
    assert not flag.is_set
    it.cancel("long")
    assert flag.is_set == is_aborted
    it.end()
    assert not flag.is_set, "the flag never meets another decode"
    assert it.batch == {}


def test_several_that_are_cancelled_count_together(flag: Flag) -> None:
    it = interrupter(flag)
    it.begin({"a": 100, "b": 100, "c": 150})
    it.cancel("a")
    assert not flag.is_set
    it.cancel("b")
    assert flag.is_set


def test_who_was_cancelled_just_before_the_decode_is_not_computed_to_the_end(flag: Flag) -> None:
    it = interrupter(flag)
    it.cancel("long")
    it.begin({"long": 500, "other": 1})
    assert flag.is_set


def test_a_name_that_is_used_again_is_not_suspected(flag: Flag) -> None:
    it = interrupter(flag)
    it.cancel("long")
    it.forget("long")
    it.begin({"long": 500, "other": 1})
    assert not flag.is_set


def test_a_storm_of_cancellations_aborts_no_more_than_every_other_decode(flag: Flag) -> None:
    it = interrupter(flag)
    aborted = []
    for number in range(6):
        it.begin({f"r{number}": 500, "other": 1})
        it.cancel(f"r{number}")
        aborted.append(flag.is_set)
        it.end()
    assert aborted == [True, False] * 3
    it.begin({"alone": 500})
    it.cancel("alone")
    assert flag.is_set, "nobody else is kept waiting"


def test_where_memory_cannot_give_up_a_part_only_a_decode_of_nobody_else_is_aborted(
    flag: Flag,
) -> None:
    it = interrupter(flag, can_truncate=False)
    it.begin({"long": 500, "other": 1})
    it.cancel("long")
    assert not flag.is_set
    it.end()
    it.begin({"alone": 500})
    it.cancel("alone")
    assert flag.is_set


class Collected(Mapping[str, int]):
    """Rows that cancel a request when they are looked at, as a collected stream would."""

    def __init__(self, it: Interrupter) -> None:
        self._it = it

    def __getitem__(self, key: str) -> int:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def values(self) -> list[int]:  # type: ignore[override]  # all that is asked for
        if "dropped" not in self._it._cancelled:
            self._it.cancel("dropped")
        return []


def test_a_stream_collected_inside_does_not_lock_the_thread_up(flag: Flag) -> None:
    it = interrupter(flag)
    thread = threading.Thread(target=it.begin, args=(Collected(it),), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
