"""Structured output: schemas, regular expressions and grammars as constraints, by llguidance.

Constraints are compiled on a worker thread and used on the inference thread.  llguidance limits the
cost of compilation and of each token; a constraint that costs more ends its request.  llguidance
comes with the extra `structured` and is imported at the first use.
"""

from __future__ import annotations

import importlib
import json
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cllm.engine.constraint import Mask, NotAvailableError
from cllm.engine.constraints.gbnf import GbnfError, lark_of_gbnf
from cllm.engine.json_schema import enforceable
from cllm.engine.vocabulary import GuidanceVocabulary
from cllm.errors import CllmError, InvalidRequestError

# Limit of Earley items for a mask; 20,000 take a millisecond.  GBNF becomes many short lexemes, which
# need more than llguidance's default of 50,000.
MAX_ITEMS_OF_GRAMMARS = 200_000
# Limit of the lexer's work for a token.  Tool calls have texts of limited length that end at a marker.
# These need more than llguidance's default of 200,000: a tenth of a second, once.
MAX_LEXING_OF_TOOLS = 6_000_000
# The same limit for the start of a grammar; llguidance's default is 1,000,000.
MAX_LEXING_OF_STARTS = 5_000_000
N_COMPILED_MAX = 16  # constraints kept after compilation; one may take tens of MiB
MAX_PART = 256  # characters that are tokenized at once
# White space between JSON tokens, at most one character: a model could otherwise write it without end.
# A schema can allow more: `"x-guidance": {"whitespace_pattern": …}`.
WHITESPACE = r"[ \n]?"


class Guidance:
    """Compiles constraints for one vocabulary, and computes their masks: a constraint family.

    Parameters
    ----------
    vocabulary : GuidanceVocabulary
    n_threads : int
        Number of threads that compute masks.

    Raises
    ------
    NotAvailableError
        llguidance is not installed, or the vocabulary has no token that ends an output.
    """

    def __init__(self, vocabulary: GuidanceVocabulary, n_threads: int) -> None:
        try:
            # Not `import`: the extra has no part in type checking without it.
            self._llguidance: Any = importlib.import_module("llguidance")
        except ImportError:
            missing = (
                "structured output needs the extra 'structured': pip install 'cllm[structured]'"
            )
            raise NotAvailableError(missing) from None
        self.n_vocab: int = vocabulary.n_tokens
        self.ends: tuple[int, ...] = vocabulary.ends
        if not self.ends:
            raise NotAvailableError("the vocabulary has no token that ends an output")
        self._vocabulary = vocabulary
        self._executor = self._llguidance.LLExecutor(n_threads)
        self._n_words = (self.n_vocab + 31) // 32
        self._bits: NDArray[np.int32] = np.zeros((1, self._n_words), np.int32)
        self._compiled: OrderedDict[tuple[str, str], CompiledMatcher] = OrderedDict()

    @cached_property
    def tokenizer(self) -> Any:
        """The vocabulary as llguidance reads it.  The first use takes 7 µs a token, half of it with the GIL."""
        return self._llguidance.LLTokenizer(
            self._llguidance.TokenizerWrapper(_Tokens(self._vocabulary, self.ends[0])),
            eos_token=list(self.ends),
        )

    def compile(self, field: str, text: str) -> CompiledMatcher:
        """Return the compiled constraint of a text.  Worker thread only.

        `field` is `json_schema`, `regex`, `grammar` (GBNF), `lark` or `tools` (both Lark).

        Raises
        ------
        InvalidRequestError
            The text cannot be used; the message has the reason.
        """
        compiled = self._compiled.get((field, text))
        if compiled is None or compiled.is_broken:
            compiled = self._compiled[field, text] = self._compile(field, text)
            while len(self._compiled) > N_COMPILED_MAX:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end((field, text))
        return compiled

    def _compile(self, field: str, text: str) -> CompiledMatcher:
        matchers = self._llguidance.LLMatcher
        limits = self._llguidance.LLParserLimits(
            step_max_items=MAX_ITEMS_OF_GRAMMARS if field in ("grammar", "lark") else None,
            step_lexer_fuel=MAX_LEXING_OF_TOOLS if field == "tools" else None,
            initial_lexer_fuel=MAX_LEXING_OF_STARTS if field == "tools" else None,
        )
        try:
            if field == "regex":
                grammar = matchers.grammar_from_regex(text)
            elif field == "grammar":
                lark = lark_of_gbnf(text, self.n_vocab, self._token_of)
                grammar = matchers.grammar_from_lark(lark)
            elif field in ("lark", "tools"):
                grammar = matchers.grammar_from_lark(text)
            else:
                defaults = {"whitespace_pattern": WHITESPACE}
                schema = json.dumps(enforceable(field, json.loads(text)))
                grammar = matchers.grammar_from_json_schema(schema, defaults=defaults)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                field, text, f"a schema that can be enforced: {error}"
            ) from None
        except GbnfError as error:
            raise InvalidRequestError(field, text, str(error)) from None
        except ValueError as error:
            raise InvalidRequestError(field, text, f"usable ({error})") from None
        matcher = matchers(self.tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            # The first mask shows if any output can satisfy the constraint.
            first = matcher.deep_copy()
            first.compute_bitmask()
            if not first.is_error():
                return CompiledMatcher(self, matcher)
            matcher = first
        raise InvalidRequestError(field, text, f"usable ({_reason(matcher)})")

    def _token_of(self, text: str) -> int | None:
        tokens = self._vocabulary.tokenize(text, add_special=False, parse_special=True)
        return tokens[0] if len(tokens) == 1 else None

    def masks(self, constraints: Sequence[Matcher]) -> list[Mask | Exception]:
        """Compute the masks in parallel, on llguidance's own threads; see `ConstraintFamily`."""
        n = len(constraints)
        if len(self._bits) < n:
            self._bits = np.zeros((n, self._n_words), np.int32)
        self._executor.unsafe_compute_mask_ptr(
            [(constraint.matcher, row) for row, constraint in enumerate(constraints)],
            self._bits.ctypes.data,
            4 * self._n_words,
            len(self._bits),
        )
        return [self._mask(constraint, row) for row, constraint in enumerate(constraints)]

    def _mask(self, constraint: Matcher, row: int) -> Mask | Exception:
        if constraint.matcher.is_error():
            return constraint.failure()
        bits = self._bits[row].view(np.uint8)
        mask: Mask = np.unpackbits(bits, count=self.n_vocab, bitorder="little").view(np.bool_)
        mask[list(self.ends)] = constraint.matcher.is_accepting()
        return mask


class CompiledMatcher:
    """A `CompiledConstraint`.

    Attributes
    ----------
    is_broken : bool
        True after an error of one of its matchers.  All of them share a lexer that is then unusable:
        the next request compiles the constraint again.
    """

    def __init__(self, family: Guidance, matcher: Any) -> None:
        self.family: Guidance = family
        self.is_broken = False
        self._matcher = matcher

    def start(self) -> Matcher:
        """Return the matcher at the beginning of an output."""
        return Matcher(self, self._matcher.deep_copy())


class Matcher:
    """`TokenConstraint` of one output: llguidance's parser and its position."""

    def __init__(self, compiled: CompiledMatcher, matcher: Any) -> None:
        self.family: Guidance = compiled.family
        self.matcher = matcher
        self._compiled = compiled
        self._forced: deque[int] = deque()  # forced tokens that are computed but not accepted yet

    def allows(self, token: int) -> bool:
        """Return True if the output may continue, or end, with this token."""
        if token in self.family.ends:
            return bool(self.matcher.is_accepting())
        is_allowed = bool(self.matcher.validate_tokens([token]) == 1)
        if self.matcher.is_error():
            raise self.failure()
        return is_allowed

    def accept(self, token: int) -> None:
        """Advance the constraint by a token that it allows."""
        if token not in self.family.ends and not self.matcher.consume_token(token):
            raise self.failure()
        if self._forced and self._forced.popleft() != token:
            self._forced.clear()

    def forced(self) -> Sequence[int]:
        """Return the next tokens that the constraint forces; empty if it leaves a choice."""
        if not self._forced:  # the whole of a long text is found at once
            self._forced.extend(self.matcher.compute_ff_tokens())
        return self._forced

    def failure(self) -> CllmError:
        """Return the error of a constraint that cannot continue, and discard its compiled form."""
        self._compiled.is_broken = True
        return CllmError(f"the constraint cannot be followed: {_reason(self.matcher)}")

    def close(self) -> None:
        """Do nothing: the matcher is freed when it is collected."""


class _Tokens:
    """A vocabulary as llguidance reads it."""

    def __init__(self, vocabulary: GuidanceVocabulary, end: int) -> None:
        self._vocabulary = vocabulary
        self.eos_token_id = end
        self.bos_token_id = None
        self.tokens, self.special_token_ids = _spelled(vocabulary)

    def __call__(self, text: bytes) -> list[int]:
        # llguidance's own threads call this.  Their stacks are small, and some tokenizers recurse for every
        # character: the text is cut.  The places of the cuts do not change the allowed tokens.
        whole = text.decode("utf-8", "replace")
        parts = [whole[i : i + MAX_PART] for i in range(0, len(whole), MAX_PART)]
        return [token for part in parts for token in self._vocabulary.tokenize_inside(part)]


def _spelled(vocabulary: GuidanceVocabulary) -> tuple[list[bytes], list[int]]:
    """Return the bytes of every token, and the ids of the tokens without text (control tokens)."""
    pieces = vocabulary.pieces()
    special = [token for token, piece in enumerate(pieces) if not piece]
    for token in special:
        pieces[token] = vocabulary.spelling(token) or b"<%d>" % token
    return pieces, special


def _reason(matcher: Any) -> str:
    """Return the error of a matcher without llguidance's internal state."""
    lines: Iterable[str] = str(matcher.get_error()).strip().splitlines()
    reason = " ".join(line.strip() for line in lines if line.strip())
    reason = reason.split("<state>")[0].split("<backtrace>")[0].strip()
    return "nothing satisfies it" if reason.startswith("NoExtension") else reason[:300]
