"""Damaged model files, opened as users open them; the program of the same name has the full numbers."""

from __future__ import annotations

import collections

import pytest

from tests.reliability.damaged_models import BUSY_LIMIT_S, Verdict, examine, findings
from tests.reliability.gguf_damage import BASES, KINDS, N_FILES, base, corpus, damage, members

pytestmark = pytest.mark.full

N_BY_DEFAULT = 60


@pytest.fixture(scope="module")
def verdicts() -> list[list[Verdict]]:
    """Of files of all kinds."""
    return examine(members(N_BY_DEFAULT))


@pytest.mark.timeout(300)
def test_a_damaged_file_harms_nobody(verdicts: list[list[Verdict]]) -> None:
    assert findings(verdicts, limit_s=BUSY_LIMIT_S) == []


def test_some_load_some_are_refused_and_some_end_the_process_that_tries_them(
    verdicts: list[list[Verdict]],
) -> None:
    """The corpus has them all: none of these is claimed of nothing."""
    found = collections.Counter(v.verdict for share in verdicts for v in share)
    assert found["loaded"] >= 3
    assert found["refused"] >= 20
    assert found["SIGABRT"] + found["SIGSEGV"] >= 1
    assert found.total() == N_BY_DEFAULT


def test_a_file_in_pieces_is_put_together_to_the_byte() -> None:
    for index in range(len(BASES)):
        whole, file = base(index)
        assert file.encoded() == whole


def test_the_corpus_has_different_files_of_every_kind_and_the_same_ones_every_time() -> None:
    found = corpus()
    assert len(set(found)) == len(found) == N_FILES == 2000
    assert {kind for kind, _ in members(N_BY_DEFAULT)} == set(KINDS)
    for member in members(N_BY_DEFAULT):
        assert damage(*member) == damage(*member)


BAD = {
    "the host ended: -11": Verdict("kind", 1, "broken", "the host ended: -11"),
    "the verdict took 11.0 s": Verdict("kind", 1, "refused", "?", seconds=11.0),
    "3 of 4 requests ended": Verdict("kind", 1, "loaded", ends=["stop"] * 3),
    "n_fds of a host": Verdict("kind", 1, "refused", n_threads=1, n_fds=9),
    "n_threads of a host": Verdict("kind", 1, "refused", n_threads=2, n_fds=8),
}


@pytest.mark.parametrize("says", BAD)
def test_what_contradicts_the_claim_is_found(says: str) -> None:
    good = Verdict("kind", 0, "refused", "?", n_threads=1, n_fds=8)
    assert findings([[good]]) == []
    (found,) = findings([[good, BAD[says]]])
    assert says in found


def test_a_host_that_grows_is_found() -> None:
    many = [Verdict("kind", i, "refused", n_threads=1, rss_mib=100 + i) for i in range(200)]
    (found,) = findings([many])
    assert "has grown by" in found


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_all_damaged_files_harm_nobody() -> None:
    assert findings(examine(corpus()), limit_s=BUSY_LIMIT_S) == []
