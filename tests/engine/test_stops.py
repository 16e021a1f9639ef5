"""Where an output ends and what its text is then, token by token, in a vocabulary of odd pieces."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm import Completion, Engine, FinishReason
from cllm.engine.core.engine_core import EngineCore
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling.logprobs import LogprobReader
from cllm.engine.sampling_params import SamplingParams
from cllm.testing.fake_decoder import FakeRun, Fault
from tests.conftest import examples
from tests.simulation.reference import Outcome
from tests.simulation.simulator import Simulator

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
CONTROL, BROKEN, CLOSE, END = 254, 255, 256, 257
PROMPT = (CONTROL,) * 8
STOP_ID_TEXT = b"</close>"


class PieceVocabulary:
    """Tokens 0, 1, ... have these pieces.  Others: no text, none to be had, a stop id, the end."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = {**dict(enumerate(pieces)), CONTROL: b"", CLOSE: STOP_ID_TEXT, END: b""}

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def spelling(self, token: int) -> bytes:
        return self._pieces.get(token, b"<?>")

    def is_eog(self, token: int) -> bool:
        return token == END


class TextSimulator(Simulator):
    """A core whose every output is these pieces in their order, and then the token `last`."""

    def __init__(
        self, pieces: Sequence[bytes], *, last: int = END, n_ctx: int = 64, **options: Any
    ) -> None:
        self.vocabulary = PieceVocabulary(pieces)
        self.script = (*range(len(pieces)), last)
        super().__init__(
            answer=lambda tokens: self.script[len(tokens) - len(PROMPT)],
            n_ctx=n_ctx, n_seq_max=1, prefix_cache=False, **options,
        )  # fmt: skip

    def _make_core(self) -> EngineCore:
        return EngineCore(
            self.decoder,
            self.vocabulary,
            self.kv_cache,
            self._make_sampler,
            LogprobReader(self.vocabulary, self.decoder.n_vocab).read,
            self.config,
            clock=lambda: self.now,
        )

    def begin(
        self,
        *,
        prompt: tuple[int, ...] = PROMPT,
        deadline: float | None = None,
        strips_space: bool = False,
        **sampling: Any,
    ) -> str:
        request = GenerationRequest(
            request_id="r",
            serial=0,
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0, **sampling),
            priority=0,
            submitted_at=self.now,
            deadline=deadline,
            strips_space=strips_space,
        )
        self.requests["r"] = request
        self.core.queue.submit(request)
        return "r"

    def result(self, **options: Any) -> Outcome:
        """What a request ends with."""
        request_id = self.begin(**options)
        self.run()
        self.check_idle()
        return self.outcome(request_id)


# --- Stop strings -------------------------------------------------------------------------------
E1, E2 = (bytes([byte]) for byte in "é".encode())
F1, F2, F3, F4 = (bytes([byte]) for byte in "🙂".encode())


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "match", "n_tokens"),
    [
        ([b"one STOP two", b"three"], ["STOP"], "one ", "STOP", 1),
        ([b"one ST", b"OP two", b"three"], ["STOP"], "one ", "STOP", 2),
        ([b"o", b"ne S", b"T", b"O", b"P", b"!"], ["STOP"], "one ", "STOP", 5),
        ([b"STOP"], ["STOP"], "", "STOP", 1),
        ([b"ST", b"OST", b"OP"], ["STOP"], "STO", "STOP", 3),
        ([b"ST", b"", b"", b"OP", b"x"], ["STOP"], "", "STOP", 4),
        ([b"ca", b"f" + E1, E2, b"x"], ["fé"], "ca", "fé", 3),
        ([b"ca", b"f" + E1, E2 + b" au lait"], ["é"], "caf", "é", 3),
        ([b"x" + F1, F2, F3, F4, b"y"], ["🙂"], "x", "🙂", 4),
        ([b"x" + F1 + F2, F3 + F4 + b"!", b"y"], ["🙂!"], "x", "🙂!", 2),
        ([b"a" + E1, b"STOP"], ["STOP"], "a\ufffd", "STOP", 2),
        ([b"a\xff", b"b"], ["\ufffdb"], "a", "\ufffdb", 2),
        ([b"ab", b"cd", b"e"], ["bcd", "c"], "ab", "c", 2),
        ([b"ab", b"cd", b"e"], ["cd", "bc"], "a", "bc", 2),
        ([b"ab", b"c", b"d"], ["abcd", "bc"], "a", "bc", 2),
        ([b"abc"], ["c", "bc", "abc"], "", "abc", 1),
        ([b"x", b"aab"], ["aaab", "ab"], "xa", "ab", 2),
        ([b"<|", b"end", b"|>", b"!"], ["<|end|>", "<|eot|>"], "", "<|end|>", 3),
    ],
)
def test_the_first_stop_string_to_be_complete_ends_the_text_before_it(
    pieces: list[bytes], stop: list[str], text: str, match: str, n_tokens: int
) -> None:
    assert TextSimulator(pieces).result(stop=stop) == Outcome(
        tuple(range(n_tokens)), text, STOP, match
    )


@pytest.mark.parametrize(
    ("pieces", "stop"),
    [
        ([b"ST", b"O"], ["STOP"]),
        ([b"STO", b"", b"Q"], ["STOP"]),
        ([b"f" + E1, b"\xa8"], ["fé"]),
        ([b"f" + E1], ["fé"]),
        ([b"x" + F1, F2, b"y"], ["🙂", "x🙂"]),
        ([b"stop"], ["STOP"]),
    ],
)
def test_what_only_looks_like_a_stop_string_is_text(pieces: list[bytes], stop: list[str]) -> None:
    text = b"".join(pieces).decode(errors="replace")
    tokens = (*range(len(pieces)), END)
    assert TextSimulator(pieces).result(stop=stop) == Outcome(tokens, text, STOP, END)


def test_a_stop_string_counts_from_the_beginning_of_the_output() -> None:
    sim = TextSimulator([b"OP", b"ST"])
    result = sim.result(prompt=(*PROMPT[1:], 1), stop=["STOP"], max_tokens=1)
    assert result == Outcome((0,), "OP", LENGTH, "max_tokens")


def test_the_space_before_a_text_is_in_no_stop_string() -> None:
    pieces = [b"", b" ", b" STOP"]
    assert TextSimulator(pieces).result(strips_space=True, stop=[" STOP"]) == Outcome(
        (0, 1, 2), "", STOP, " STOP"
    )
    assert TextSimulator([b" STOP", b"!"]).result(strips_space=True, stop=[" STOP"]) == Outcome(
        (0, 1, END), "STOP!", STOP, END
    )


@pytest.mark.parametrize("limit", [{"max_tokens": 2}, {}], ids=["max_tokens", "context"])
def test_a_stop_string_completed_by_the_last_token_there_may_be_is_why_it_ends(
    limit: dict[str, int],
) -> None:
    pieces, n_ctx = [b"a ST", b"OP!", b"more"], 64 if limit else len(PROMPT) + 1
    ended = TextSimulator(pieces, n_ctx=n_ctx).result(stop=["STOP"], **limit)
    assert ended == Outcome((0, 1), "a ", STOP, "STOP")
    no_match = TextSimulator(pieces, n_ctx=n_ctx).result(stop=["STOP?"], **limit)
    stop_reason = "max_tokens" if limit else "context"
    assert no_match == Outcome((0, 1), "a STOP!", LENGTH, stop_reason)


# --- Stop ids -----------------------------------------------------------------------------------
def test_a_stop_id_has_no_text_and_wins_over_a_stop_string_it_would_complete() -> None:
    stop = "x" + STOP_ID_TEXT.decode()
    result = TextSimulator([b"a", b"x"], last=CLOSE).result(stop=[stop], stop_token_ids=[CLOSE])
    assert result == Outcome((0, 1, CLOSE), "ax", STOP, CLOSE)


def test_the_first_of_stop_id_and_stop_string_ends_the_output() -> None:
    pieces = [b"a", b"STOP", b"b"]
    by_text = TextSimulator(pieces, last=CLOSE).result(stop=["STOP"], stop_token_ids=[CLOSE])
    assert by_text == Outcome((0, 1), "a", STOP, "STOP")
    by_id = TextSimulator(pieces, last=CLOSE).result(stop=["STOP"], stop_token_ids=[0, CLOSE])
    assert by_id == Outcome((0,), "", STOP, 0)


# --- Every end ----------------------------------------------------------------------------------
def _cancel(sim: TextSimulator) -> None:
    sim.core.queue.cancel("r")


def _pass_the_deadline(sim: TextSimulator) -> None:
    sim.now = DEADLINE
    sim.core.tick()


def _fail_the_engine(sim: TextSimulator) -> None:
    sim.is_checked = False  # llama.cpp is left alone, with what it holds
    sim.core.fail_all(RuntimeError("scripted"))


@dataclass(frozen=True)
class Way:
    """How an output ends after its last piece, if no stop string ends it before."""

    reason: FinishReason
    stop_reason: str | int | None = None
    last: int | None = None
    act: Callable[[TextSimulator], None] | None = None


DEADLINE = 100.0
WAYS = {
    "eog": Way(STOP, END, END),
    "stop id": Way(STOP, CLOSE, CLOSE),
    "max_tokens": Way(LENGTH, "max_tokens"),
    "context": Way(LENGTH, "context"),
    "cancel": Way(FinishReason.CANCELLED, act=_cancel),
    "deadline": Way(FinishReason.DEADLINE, act=_pass_the_deadline),
    "NaN": Way(FinishReason.ERROR),
    "no piece": Way(FinishReason.ERROR, None, BROKEN),
    "engine failed": Way(FinishReason.ERROR, act=_fail_the_engine),
}


def ended(
    name: str, pieces: Sequence[bytes], stop: Sequence[str], *, strips_space: bool = False
) -> tuple[Outcome, list[str]]:
    """What an output ends with, and its streamed text after each event."""
    way, n_pieces = WAYS[name], len(pieces)

    def poison(run: FakeRun) -> Fault | None:
        n_tokens = run.p0 + len(run.tokens)
        return "nan" if name == "NaN" and n_tokens == len(PROMPT) + n_pieces else None

    sim = TextSimulator(
        pieces,
        last=END if way.last is None else way.last,
        n_ctx=len(PROMPT) + n_pieces - 1 if name == "context" else 64,
        poison=poison,
    )
    request_id = sim.begin(
        strips_space=strips_space,
        deadline=DEADLINE if name == "deadline" else None,
        stop=stop,
        max_tokens=n_pieces if name == "max_tokens" else None,
        stop_token_ids=[CLOSE] if name == "stop id" else [],
        logprobs=None if name == "no piece" else 0,
    )
    texts = []
    while request_id not in sim.finished:
        if way.act is not None and len(sim.tokens[request_id]) == n_pieces:
            way.act(sim)
            sim.hear()
        else:
            sim.tick()
        texts.append(sim.texts[request_id])
    outcome, finished = sim.outcome(request_id), sim.finished[request_id]
    assert finished.completion.logprobs is None or (
        tuple(logprob.token_id for logprob in finished.completion.logprobs) == outcome.token_ids
    )
    assert (finished.error is not None) == (outcome.reason is FinishReason.ERROR)
    return outcome, texts


def stable(data: bytes) -> str:
    """The text of these bytes that no later byte can change."""
    return codecs.utf_8_decode(data, "replace", False)[0]


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, of two at once the longer one."""
    found = [(text.index(s) + len(s), text.index(s), s) for s in stop if s in text]
    if not found:
        return text, None
    _, start, match = min(found)
    return text[:start], match


def by_definition(name: str, pieces: Sequence[bytes], stop: Sequence[str]) -> Outcome:
    """What an output ends with, from all of its text."""
    way = WAYS[name]
    for n_tokens in range(len(pieces) + 1):
        text, match = before_stop(stable(b"".join(pieces[:n_tokens])), stop)
        if match is not None:
            return Outcome(tuple(range(n_tokens)), text, STOP, match)
    tokens = (*range(len(pieces)), *([] if way.last is None else [way.last]))
    text, _ = before_stop(b"".join(pieces).decode(errors="replace"), stop)
    return Outcome(tokens, text, way.reason, way.stop_reason)


@pytest.mark.parametrize("name", WAYS)
def test_every_end_releases_what_was_held_back(name: str) -> None:
    outcome, texts = ended(name, [b"ab", b"c STO", b"", F1 + F2], ["STOP", "STO🙂"])
    assert outcome.text == "abc STO\ufffd"
    assert outcome == by_definition(name, [b"ab", b"c STO", b"", F1 + F2], ["STOP", "STO🙂"])
    assert texts[:4] == ["ab", "abc ", "abc ", "abc "] or name in {"max_tokens", "context"}


@pytest.mark.parametrize("name", WAYS)
def test_no_end_comes_before_a_stop_string_that_is_complete(name: str) -> None:
    outcome, _ = ended(name, [b"ab", b"c STO", b"P", b"d"], ["STOP"])
    assert outcome == Outcome((0, 1, 2), "abc ", STOP, "STOP")


@pytest.mark.parametrize("name", ["cancel", "deadline", "engine failed"])
def test_a_request_that_ends_before_its_first_token_has_no_text(name: str) -> None:
    outcome, _ = ended(name, [], ["STOP"])
    assert outcome == Outcome((), "", WAYS[name].reason, None)


@pytest.mark.parametrize("interruption", ["preempted", "new context"])
def test_what_is_held_back_survives_an_interruption(interruption: str) -> None:
    sim = TextSimulator([b"a " + F1, F2 + F3, F4 + b"ST", b"OP", b"x"], n_batch=16)
    request_id = sim.begin(stop=["🙂STOP"])
    while request_id not in sim.finished:
        for sequence in list(sim.core.queue.running):
            if interruption == "preempted":
                sim.core.queue.preempt(sequence)
            else:
                sim.core.mark_corrupt(RuntimeError("scripted"))
        sim.tick()
    assert sim.outcome(request_id) == Outcome((0, 1, 2, 3), "a ", STOP, "🙂STOP")
    statistics = sim.core.statistics()
    assert statistics.n_preemptions + statistics.n_rebuilds == 3


PIECES = st.lists(
    st.sampled_from(
        (
            *(b"a", b"b", b"ab", b"ba", b" ", b" a", b"", "é".encode(), "a€".encode(), b"b\xff"),
            *(E1, E2, b"a" + E1, E2 + b"b", b"\xe2\x82", b"\xacb", F1 + F2, F3 + F4, F2, F4 + b"a"),
        )
    ),
    min_size=1,
    max_size=12,
)
STOPS = st.lists(st.text("abé€🙂 ", min_size=1, max_size=4), max_size=4)


@examples(600)
@given(st.sampled_from(list(WAYS)), PIECES, STOPS, st.booleans())
def test_any_pieces_stops_and_ends_give_the_text_by_definition_and_nothing_is_taken_back(
    name: str, pieces: list[bytes], stop: list[str], strips_space: bool
) -> None:
    outcome, texts = ended(name, pieces, stop, strips_space=strips_space)
    if strips_space:
        first = next((i for i, piece in enumerate(pieces) if piece), 0)
        pieces = [*pieces[:first], pieces[first].removeprefix(b" "), *pieces[first + 1 :]]
    assert outcome == by_definition(name, pieces, stop)
    assert texts[-1] == outcome.text
    for n_tokens, text in enumerate(texts[:-1], 1):
        seen = stable(b"".join(pieces[:n_tokens]))
        held = seen.removeprefix(text)
        assert seen == text + held
        assert outcome.text.startswith(text)
        assert not held or any(s.startswith(held) and s != held for s in stop)


# --- min_tokens and ignore_eos, in a real model -------------------------------------------------
@pytest.mark.anyio
async def test_no_end_is_sampled_before_min_tokens_nor_ever_with_ignore_eos(engine: Engine) -> None:
    async def answer(**sampling: Any) -> Completion:
        return await engine.generate("2+3=", temperature=0, **sampling)

    five = ord("5")
    short = await answer(max_tokens=40)
    eos = short.token_ids[-1]
    assert (short.text, short.token_ids, short.stop_reason) == ("5", (five, eos), eos)

    for n in (0, 1, 2, 3, 9):
        longer = await answer(max_tokens=40, min_tokens=n)
        assert eos not in longer.token_ids[:n]
        assert longer.usage.n_output == len(longer.token_ids) >= n
        assert (longer.finish_reason == "stop") == (longer.token_ids[-1] == eos)
        assert longer.token_ids == short.token_ids or n > 1

    cut = await answer(max_tokens=4, min_tokens=4)
    assert (cut.finish_reason, cut.stop_reason, cut.usage.n_output) == (LENGTH, "max_tokens", 4)
    assert eos not in cut.token_ids

    never = await answer(max_tokens=20, ignore_eos=True)
    assert (never.stop_reason, never.usage.n_output) == ("max_tokens", 20)
    assert eos not in never.token_ids

    at_once = await answer(stop_token_ids=[five])
    assert (at_once.text, at_once.token_ids, at_once.stop_reason) == ("", (five,), five)
    for n in (1, 3):
        later = await answer(max_tokens=40, min_tokens=n, stop_token_ids=[five])
        assert not {five, eos} & set(later.token_ids[:n])
    ignored = await answer(max_tokens=20, ignore_eos=True, stop_token_ids=[five])
    assert (ignored.finish_reason, ignored.stop_reason) == (STOP, five)
