"""Vocabulary: tokens of a model, text to ids and ids to bytes.

Any thread may use it ("The API is thread-safe", llama.h), unlike the rest of a model.  The caller
must keep the model open meanwhile.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import compress, repeat
from typing import Any

from cllm.bindings import _llama_h as h
from cllm.bindings._handle import NativeHandle
from cllm.bindings._library import library
from cllm.checks import INT32_MAX, check_bool, check_int, encode_prompt, encode_text
from cllm.errors import InvalidArgumentError, LlamaCallError

# Bytes of a buffer for the text of one token.
PIECE_BYTES = 64


class Vocabulary:
    """Tokens of a model: text to ids and ids to bytes.  Any thread.

    Attributes
    ----------
    path : str
        File of the model.
    n_tokens : int
    kind : VocabType
    bos, eos, eot, nl, pad, sep, fim_pre, fim_suf, fim_mid, fim_rep, fim_sep : int or None
        Special tokens; None if missing.  The last five fill in text: they precede its prefix, suffix
        and middle, a repository's name and a file.
    adds_bos, adds_eos, adds_sep : bool
        True if `tokenize(add_special=True)` adds this token.
    suppressed : tuple of int
        Tokens that are never to be sampled, as the model's file says.
    """

    def __init__(self, model: NativeHandle, path: str) -> None:
        lib = library()
        self.path = path
        self._model = model
        self._vocab = lib.llama_model_get_vocab(model._shared_pointer)
        self._pieces: dict[int, bytes] = {}
        self._is_eog: dict[int, bool] = {}
        self.n_tokens: int = int(lib.llama_vocab_n_tokens(self._vocab))
        self.kind: h.VocabType = h.VocabType(lib.llama_vocab_type(self._vocab))
        self.bos: int | None = _token_or_none(lib.llama_vocab_bos(self._vocab))
        self.eos: int | None = _token_or_none(lib.llama_vocab_eos(self._vocab))
        self.eot: int | None = _token_or_none(lib.llama_vocab_eot(self._vocab))
        self.nl: int | None = _token_or_none(lib.llama_vocab_nl(self._vocab))
        self.pad: int | None = _token_or_none(lib.llama_vocab_pad(self._vocab))
        self.sep: int | None = _token_or_none(lib.llama_vocab_sep(self._vocab))
        self.fim_pre: int | None = _token_or_none(lib.llama_vocab_fim_pre(self._vocab))
        self.fim_suf: int | None = _token_or_none(lib.llama_vocab_fim_suf(self._vocab))
        self.fim_mid: int | None = _token_or_none(lib.llama_vocab_fim_mid(self._vocab))
        self.fim_rep: int | None = _token_or_none(lib.llama_vocab_fim_rep(self._vocab))
        self.fim_sep: int | None = _token_or_none(lib.llama_vocab_fim_sep(self._vocab))
        self.adds_bos: bool = bool(lib.llama_vocab_get_add_bos(self._vocab))
        self.adds_eos: bool = bool(lib.llama_vocab_get_add_eos(self._vocab))
        self.adds_sep: bool = bool(lib.llama_vocab_get_add_sep(self._vocab))
        n_suppressed = ctypes.c_int32(0)
        suppressed = lib.llama_vocab_get_suppress_tokens(self._vocab, n_suppressed)
        self.suppressed: tuple[int, ...] = tuple(suppressed[i] for i in range(n_suppressed.value))

    @property
    def _pointer(self) -> Any:
        # The vocabulary handle of a freed model answers garbage instead of failing: ask the model.
        self._model._shared_pointer  # noqa: B018  # raises ClosedError, WrongProcessError
        if self.kind is h.VocabType.NONE:  # any question about a token aborts
            raise InvalidArgumentError("model", self.path, "a model with a vocabulary")
        return self._vocab

    def check_token(self, token: int) -> int:
        """Return `token`; raise `InvalidArgumentError` if it is out of range, which would end the process."""
        return check_int("token", token, 0, self.n_tokens - 1)

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        Parameters
        ----------
        text : str
            At most 1 MiB of UTF-8, without lone surrogates (they abort BPE tokenizers); else
            `InvalidArgumentError` is raised.
        add_special : bool
            Add the tokens for beginning and end that the model wants; see `adds_bos`, `adds_eos`, `adds_sep`.
        parse_special : bool
            Read `<|im_start|>` and its like as control tokens rather than as text.

        Notes
        -----
        Long runs of one character class recurse deeply in some vocabularies: tokenize more than a few
        hundred bytes on a thread with a large stack.  See `llama_tokenize` in llama.h.
        """
        encoded = encode_prompt(text)
        check_bool("add_special", add_special)
        check_bool("parse_special", parse_special)
        capacity = len(encoded) + 8
        while True:
            tokens = (ctypes.c_int32 * capacity)()
            n_tokens = library().llama_tokenize(
                self._pointer, encoded, len(encoded), tokens, capacity, add_special, parse_special
            )
            if n_tokens >= 0:
                return tokens[:n_tokens]
            if n_tokens < -INT32_MAX:
                raise LlamaCallError("llama_tokenize", n_tokens, "more tokens than can be counted")
            capacity = -n_tokens

    def tokenize_inside(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the token ids of a text that continues another one: no space is put before it."""
        if not self.prefixes_space:
            return self.tokenize(text, add_special=False, parse_special=parse_special)
        # No token joins a newline with the text after it.
        prefix = self.tokenize("\n", add_special=False)
        tokens = self.tokenize("\n" + text, add_special=False, parse_special=parse_special)
        return tokens[len(prefix) :]

    def detokenize(
        self, tokens: Sequence[int], *, remove_special: bool = False, unparse_special: bool = False
    ) -> bytes:
        """Return the text of `tokens` as bytes, which may begin or end inside a character.

        llama.cpp removes spaces before punctuation for some GPT-2 vocabularies; `join` does not.
        `remove_special` omits the tokens for beginning and end.  `unparse_special` spells control tokens.
        See `llama_detokenize` in llama.h.
        """
        check_bool("remove_special", remove_special)
        check_bool("unparse_special", unparse_special)
        if not len(tokens):
            return b""
        array = (ctypes.c_int32 * len(tokens))(*map(self.check_token, tokens))
        capacity = 8 * len(tokens) + 64
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            n_bytes = library().llama_detokenize(
                self._pointer, array, len(tokens), buffer, capacity, remove_special, unparse_special
            )
            if n_bytes >= 0:
                return buffer.raw[:n_bytes]
            capacity = -n_bytes

    def join(self, tokens: Sequence[int]) -> bytes:
        """Return the joined bytes of `tokens`, without the space that `tokenize` puts before a text."""
        text = b"".join(map(self.piece, tokens))
        return text.removeprefix(b" ") if self.prefixes_space else text

    @cached_property
    def prefixes_space(self) -> bool:
        """True if `tokenize` puts a space before a text, which is no part of it."""
        # The vocabulary may lack "a": the first token shows the space in any case.
        first = self.tokenize("a", add_special=False)[:1]
        return b"".join(map(self.piece, first)).startswith(b" ")

    def piece(self, token: int) -> bytes:
        """Return the bytes that `token` adds to a text; empty for a control token.  Cached."""
        if type(token) is not int:  # 2.0 and True would be found in place of 2 and 1
            token = self.check_token(token)
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self.token_to_piece(token)
        return piece

    def spelling(self, token: int) -> bytes:
        """Return the bytes of `token`; for a control token, its name."""
        return self.piece(token) or self.token_to_piece(token, special=True)

    def token_to_piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; with `special`, control tokens are rendered too.

        See `llama_token_to_piece` in llama.h.
        """
        self.check_token(token)
        check_bool("special", special)
        capacity = PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            n_bytes = library().llama_token_to_piece(
                self._pointer, token, buffer, capacity, 0, special
            )
            if n_bytes >= 0:
                return buffer.raw[:n_bytes]
            capacity = -n_bytes

    def pieces(self, *, special: bool = False) -> list[bytes]:
        """Return the bytes of every token, as `token_to_piece` returns those of one.

        It takes about 2 µs a token, half of the time of one call for each.  Without `special`, `piece` has
        all tokens in its cache afterwards.
        """
        check_bool("special", special)
        pointer, buffer = self._pointer, ctypes.create_string_buffer(PIECE_BYTES)
        read, begin, text = (
            library().llama_token_to_piece,
            ctypes.addressof(buffer),
            ctypes.string_at,
        )
        pieces = []
        for token in range(self.n_tokens):
            n_bytes = read(pointer, token, buffer, PIECE_BYTES, 0, special)
            is_whole = n_bytes >= 0
            pieces.append(
                text(begin, n_bytes) if is_whole else self.token_to_piece(token, special=special)
            )
        if not special:
            self._pieces = dict(enumerate(pieces))
        return pieces

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a generation, in ascending order.  The first use takes about 0.5 µs a token."""
        return tuple(compress(range(self.n_tokens), self._of_all(library().llama_vocab_is_eog)))

    def is_eog(self, token: int) -> bool:
        """True if `token` ends a generation (end of sequence, end of turn, …).  Cached."""
        if type(token) is not int:
            token = self.check_token(token)
        is_eog = self._is_eog.get(token)
        if is_eog is None:
            self.check_token(token)
            is_eog = bool(library().llama_vocab_is_eog(self._pointer, token))
            self._is_eog[token] = is_eog
        return is_eog

    def control_names(self) -> list[str]:
        """Return the texts that `tokenize(parse_special=True)` reads as control tokens."""
        wanted = int(h.TokenAttr.CONTROL | h.TokenAttr.UNKNOWN)
        of_all = enumerate(self._of_all(library().llama_vocab_get_attr))
        return [self.text(token) for token, attributes in of_all if attributes & wanted]

    def _of_all(self, function: Any) -> Iterator[Any]:
        """Call a function of llama.h for every token."""
        return map(function, repeat(self._pointer), range(self.n_tokens))

    def text(self, token: int) -> str:
        """Return the text of `token` as the vocabulary stores it, with its marks for spaces and bytes."""
        self.check_token(token)
        raw: bytes = library().llama_vocab_get_text(self._pointer, token)
        return raw.decode("utf-8", "replace")

    def score(self, token: int) -> float:
        """The score of `token` (SentencePiece vocabularies)."""
        self.check_token(token)
        return float(library().llama_vocab_get_score(self._pointer, token))

    def attributes(self, token: int) -> h.TokenAttr:
        """The attribute flags of `token`."""
        self.check_token(token)
        return h.TokenAttr(library().llama_vocab_get_attr(self._pointer, token))

    def __repr__(self) -> str:
        return f"<Vocabulary {self.kind.name} n_tokens={self.n_tokens}>"


def _token_or_none(token: int) -> int | None:
    return None if token == h.LLAMA_TOKEN_NULL else int(token)


def c_string(field: str, text: str) -> bytes:
    """Return `text` as UTF-8 for a C string; raise `InvalidArgumentError` with `field` if it contains NUL."""
    encoded = encode_text(field, text)
    if b"\0" in encoded:
        raise InvalidArgumentError(field, text, "text without NUL characters")
    return encoded
