"""BERT in numpy, written from the paper: the reference for libllama's results with the same weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

Array = NDArray[Any]


def erf(x: Array) -> Array:
    """Return the error function by Abramowitz and Stegun 7.1.26, with an error of at most 1.5e-7."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    coefficients = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0.0)
    near_one: Array = 1 - np.polyval(coefficients, t) * np.exp(-(x**2))
    return np.sign(x) * near_one


class BertReference:
    """BERT that embeds one text at a time, in float32.

    Parameters
    ----------
    folder : Path
        Folder of `model.safetensors`, `config.json` and `tokenizer.json`.
    """

    def __init__(self, folder: Path) -> None:
        self._weights: dict[str, Array] = load_file(folder / "model.safetensors")
        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, with [CLS] and [SEP]."""
        return list(self._tokenizer.encode(text).ids)

    def embed(self, text: str) -> Array:
        """The mean of the vectors of all tokens, of length 1."""
        vector = self.hidden(self.tokenize(text)).mean(axis=0)
        return np.asarray(vector / np.linalg.norm(vector))

    def hidden(self, tokens: list[int]) -> Array:
        """The last layer's vectors, `(n_tokens, n_embd)`."""
        weights = self._weights
        x = (
            weights["embeddings.word_embeddings.weight"][tokens]
            + weights["embeddings.position_embeddings.weight"][: len(tokens)]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        x = self._norm(x, "embeddings.LayerNorm")
        for layer in range(self._config["num_hidden_layers"]):
            name = f"encoder.layer.{layer}"
            attended = self._linear(
                self._attend(x, f"{name}.attention.self"), f"{name}.attention.output.dense"
            )
            x = self._norm(x + attended, f"{name}.attention.output.LayerNorm")
            inner = self._linear(x, f"{name}.intermediate.dense")
            inner = inner * 0.5 * (1 + erf(inner / math.sqrt(2)))
            x = self._norm(
                x + self._linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm"
            )
        return x

    def _attend(self, x: Array, name: str) -> Array:
        n_head = self._config["num_attention_heads"]
        q, k, v = (
            self._linear(x, f"{name}.{part}").reshape(len(x), n_head, -1).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        together: Array = (weights @ v).transpose(1, 0, 2).reshape(len(x), -1)
        return together

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred**2).mean(axis=-1, keepdims=True)
        scaled: Array = centred / np.sqrt(variance + self._config["layer_norm_eps"])
        return scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]
