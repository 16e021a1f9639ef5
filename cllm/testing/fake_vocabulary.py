"""FakeVocabulary: the 256 bytes as tokens, for tests that need a vocabulary but no model."""

from __future__ import annotations

from collections.abc import Sequence

from cllm.checks import check_int, encode_prompt


class FakeVocabulary:
    """A vocabulary of the 256 bytes, one token each, and two control tokens.

    Attributes
    ----------
    BEGIN, END : int
        Control tokens 256 and 257.  They add no bytes to a text; END ends a generation.
    n_tokens : int
        Number of tokens: 258.
    """

    BEGIN = 256
    END = 257
    NAMES = ("<begin>", "<end>")
    n_tokens = 258
    bos: int | None = BEGIN
    eos: int | None = END
    adds_bos = False
    prefixes_space = False
    path = "<fake>"

    def piece(self, token: int) -> bytes:
        """The bytes of a token; empty for a control token."""
        token = check_int("token", token, 0, self.n_tokens - 1)
        return bytes([token]) if token < self.BEGIN else b""

    def text(self, token: int) -> str:
        """Return the text of a token: a character, `<0xNN>` for a byte above 127, or a control token's name."""
        token = check_int("token", token, 0, self.n_tokens - 1)
        if token >= self.BEGIN:
            return self.NAMES[token - self.BEGIN]
        return chr(token) if token < 128 else f"<0x{token:02X}>"

    def spelling(self, token: int) -> bytes:
        """The bytes of a token; of a control token, its name."""
        return self.piece(token) or self.text(token).encode()

    def join(self, tokens: Sequence[int]) -> bytes:
        """The bytes of some tokens."""
        return b"".join(map(self.piece, tokens))

    def pieces(self, *, special: bool = False) -> list[bytes]:
        """Return the bytes of every token; with `special`, also the names of control tokens."""
        return [self.spelling(t) if special else self.piece(t) for t in range(self.n_tokens)]

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end a generation."""
        return (self.END,)

    def is_eog(self, token: int) -> bool:
        """Return True if `token` ends a generation."""
        return token == self.END

    def control_names(self) -> list[str]:
        """Return the texts that `tokenize(parse_special=True)` reads as control tokens."""
        return list(self.NAMES)

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return the UTF-8 bytes of a text as tokens.  `add_special` adds nothing.

        With `parse_special`, `<begin>` and `<end>` in the text become control tokens.

        Raises
        ------
        InvalidArgumentError
            As `Vocabulary.tokenize` does: not a text, too long, or with a lone surrogate.
        """
        encoded = encode_prompt(text)
        if not parse_special:
            return list(encoded)
        tokens: list[int] = []
        for number, part in enumerate(encoded.split(self.NAMES[0].encode())):
            tokens += [self.BEGIN] * (number > 0)
            for other, rest in enumerate(part.split(self.NAMES[1].encode())):
                tokens += [self.END] * (other > 0)
                tokens += rest
        return tokens

    def tokenize_inside(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the tokens of a text that follows another text: the same as `tokenize`."""
        return self.tokenize(text, parse_special=parse_special)
