"""The tokens of a text, from a model's vocabulary alone."""

from __future__ import annotations

from pathlib import Path

from cllm.bindings import Model


def tokens_of(path: Path, text: str, *, add_special: bool) -> list[tuple[int, bytes]]:
    """Return the id and the bytes of each token of a text; a control token has the bytes of its name.

    Raises
    ------
    ModelLoadError, InvalidArgumentError
        The file or the text cannot be used.
    """
    with Model(path, vocab_only=True) as model:
        tokens = model.vocab.tokenize(text, add_special=add_special)
        return [(token, model.vocab.token_to_piece(token, special=True)) for token in tokens]
