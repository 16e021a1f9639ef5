"""Strategies of the bindings fuzzer: calls with valid and invalid numbers and texts.

Containers have the type that a call takes; their elements may be any values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import strategies as st

from cllm.bindings import Batch, Context, Model, SamplerChain
from tests.reliability.api_fuzz_calls import ANY_TEXT, N_VOCAB, ODD, TEXT

N_SEQ_MAX, N_CTX, N_BATCH = 4, 64, 16
# Placeholders in valid calls; the bench replaces them by values that are known only when the call is made.
NEXT = "next"  # the position that continues the sequence
OUTPUT = "output"  # the last row of the last batch
LAST = "last"  # the copy that was made last, and its positions


class Kind(NamedTuple):
    """Strategies for one argument: valid values, and odd ones of any kind."""

    good: st.SearchStrategy[Any]
    odd: st.SearchStrategy[Any] = ODD


def tokens_of(token: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for lists of 1 to 6 tokens."""
    return st.lists(token, min_size=1, max_size=6)


def biases_of(token: st.SearchStrategy[Any], bias: st.SearchStrategy[Any]) -> Any:
    """Return a strategy for biases of at most 3 tokens."""
    hashable = token.filter(lambda value: getattr(value, "__hash__", None) is not None)
    return st.dictionaries(hashable, bias, max_size=3)


FLOATS = st.floats(0.0, 10.0)
TOKEN = Kind(st.integers(0, N_VOCAB - 1))
TOKENS = Kind(tokens_of(TOKEN.good), tokens_of(TOKEN.odd) | st.just([]))
SEQ_ID = Kind(st.integers(0, N_SEQ_MAX - 1))
POSITION = Kind(st.none() | st.integers(0, N_CTX - 1))
SEED = Kind(st.integers(0, 2**32 - 2))
FRACTION = Kind(st.floats(0.0, 0.99))
NUMBER = Kind(FLOATS)
PENALTY = Kind(st.floats(0.5, 2.0))
COUNT = Kind(st.integers(1, 40))
TEMPERATURE = Kind(st.just(0.0) | st.floats(0.001, 9.0))
BIASES = Kind(biases_of(TOKEN.good, FLOATS), biases_of(ODD, ODD))
BREAKERS = Kind(st.lists(TEXT, max_size=2), st.lists(ANY_TEXT, max_size=2))
FLAG = Kind(st.booleans())
TEXTS = Kind(TEXT, ANY_TEXT | ODD)


@dataclass
class Bench:
    """Model, context, and the state that calls leave for later calls."""

    model: Model
    context: Context
    batch: Batch = field(default_factory=lambda: Batch(N_BATCH))
    copy: bytes = b""
    n_copied: int = 0

    def decode(self, seq_id: Any, tokens: Any, p0: Any, n_outputs: Any) -> object:
        """Decode one run of a sequence, alone in the batch."""
        self.batch.clear()
        if p0 == NEXT:
            last = self.context.seq_pos_max(seq_id)
            p0 = 0 if last is None else last + 1
        self.batch.add(seq_id, tokens, p0, n_outputs=n_outputs)
        return self.context.decode(self.batch).rows.sum()

    def get(self, seq_id: Any) -> object:
        """Copy a sequence, and keep the copy for `restore`."""
        self.copy = self.context.state_seq_get_data(seq_id)
        last = self.context.seq_pos_max(seq_id)
        self.n_copied = 0 if last is None else last + 1
        return self.copy

    def restore(self, data: Any, seq_id: Any, n_positions: Any) -> object:
        """Restore the kept copy, or other bytes, into a sequence."""
        data = self.copy if data == LAST else data
        n_positions = self.n_copied if n_positions == LAST else n_positions
        self.context.state_seq_set_data(data, seq_id, n_positions=n_positions)
        return None

    def sample(self, samplers: Any, row: Any, token: Any) -> object:
        """Sample from a row of the last decode with a new chain."""
        row = self.batch.n_rows - 1 if row == OUTPUT else row
        with SamplerChain(self.model.vocab) as chain:
            for name, arguments in samplers:
                getattr(chain, f"add_{name}")(*arguments)
            chosen = chain.sample(self.context, row)
            chain.accept(token)
            chain.reset()
            return chosen


@dataclass(frozen=True)
class Call:
    """One call: a method of the bench, the context or the vocabulary, or of a chain."""

    target: str
    method: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def make(self, bench: Bench) -> object:
        """Make the call on the bench, and return its result."""
        owner = {"bench": bench, "context": bench.context, "vocab": bench.model.vocab}[self.target]
        method: Callable[..., object] = getattr(owner, self.method)
        return method(*self.arguments, **dict(self.options))


SAMPLERS: dict[str, tuple[Kind, ...]] = {
    "top_k": (COUNT,), "top_p": (FRACTION, COUNT), "min_p": (FRACTION, COUNT),
    "typical": (FRACTION, COUNT), "temp": (TEMPERATURE,),
    "temp_ext": (TEMPERATURE, NUMBER, NUMBER), "xtc": (FRACTION, FRACTION, COUNT, SEED),
    "top_n_sigma": (NUMBER,), "penalties": (COUNT, PENALTY, NUMBER, NUMBER),
    "dry": (NUMBER, PENALTY, COUNT, COUNT, BREAKERS), "logit_bias": (BIASES,),
}  # fmt: skip
SELECTING: dict[str, tuple[Kind, ...]] = {
    "greedy": (), "dist": (SEED,), "mirostat": (SEED, NUMBER, NUMBER, COUNT),
    "mirostat_v2": (SEED, NUMBER, NUMBER), "adaptive_p": (FRACTION, FRACTION, SEED),
}  # fmt: skip


@st.composite
def arguments_of(draw: st.DrawFn, kinds: tuple[Kind, ...], *, is_odd: bool) -> tuple[Any, ...]:
    """Draw valid arguments; with `is_odd`, one of them is odd."""
    odd = draw(st.integers(0, len(kinds) - 1)) if is_odd and kinds else -1
    return tuple(draw(kind.odd if i == odd else kind.good) for i, kind in enumerate(kinds))


@st.composite
def chain(draw: st.DrawFn, *, is_odd: bool) -> list[tuple[str, tuple[Any, ...]]]:
    """Draw samplers and their arguments; without `is_odd`, the last one selects a token."""
    names = draw(st.lists(st.sampled_from(tuple(SAMPLERS)), max_size=2))
    names.append(draw(st.sampled_from(tuple(SAMPLERS if is_odd else SELECTING))))
    all_kinds = SAMPLERS | SELECTING
    return [(name, draw(arguments_of(all_kinds[name], is_odd=is_odd))) for name in names]


METHODS: dict[tuple[str, str], tuple[Kind, ...]] = {
    ("bench", "decode"): (SEQ_ID, TOKENS, Kind(st.just(NEXT), POSITION.good | ODD), Kind(st.just(1))),
    ("bench", "sample"): (Kind(chain(is_odd=False), chain(is_odd=True)), Kind(st.just(OUTPUT)), TOKEN),
    ("bench", "get"): (SEQ_ID,),
    ("bench", "restore"): (
        Kind(st.just(LAST), st.binary(max_size=40)), SEQ_ID, Kind(st.just(LAST), COUNT.good | ODD),
    ),
    ("context", "seq_rm"): (SEQ_ID, POSITION, POSITION),
    ("context", "seq_cp"): (SEQ_ID, SEQ_ID, Kind(st.none(), POSITION.good | ODD), POSITION),
    ("context", "memory_clear"): (),
    ("context", "seq_add"): (SEQ_ID, POSITION, POSITION, Kind(st.integers(-5, 5))),
    ("context", "seq_pos_min"): (SEQ_ID,),
    ("context", "seq_pos_max"): (SEQ_ID,),
    ("context", "output_logits"): (Kind(st.integers(0, 5)),),
    ("vocab", "tokenize"): (TEXTS,),
    ("vocab", "tokenize_inside"): (TEXTS,),
    ("vocab", "detokenize"): (TOKENS,),
    ("vocab", "join"): (TOKENS,),
    **{
        ("vocab", name): (TOKEN,)
        for name in (
            "check_token", "piece", "spelling", "token_to_piece", "is_eog", "text",
            "score", "attributes",
        )
    },
}  # fmt: skip
OPTIONS: dict[str, tuple[str, ...]] = {
    "tokenize": ("add_special", "parse_special"),
    "detokenize": ("remove_special", "unparse_special"),
    "token_to_piece": ("special",),
    "memory_clear": ("data",),
}
# Calls that other calls depend on; they are drawn more often.
OFTEN = (("bench", "decode"), ("bench", "sample"), ("context", "seq_rm"), ("context", "seq_cp"))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Draw a call; one in three has an odd argument."""
    target, method = draw(st.sampled_from((*METHODS, *OFTEN * 3)))
    is_odd = draw(st.integers(0, 2)) == 2
    arguments = draw(arguments_of(METHODS[target, method], is_odd=is_odd))
    names = draw(st.lists(st.sampled_from(OPTIONS.get(method, ("",))), unique=True))
    options = [(name, draw(FLAG.odd if is_odd else FLAG.good)) for name in names if name]
    return Call(target, method, arguments, tuple(options))
