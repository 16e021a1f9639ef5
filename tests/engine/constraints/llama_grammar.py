"""Reference for lark_of_gbnf: llama.cpp's grammar sampler, and a vocabulary of pieces of text."""

from __future__ import annotations

import ctypes
import random
import re
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from cllm.bindings import Candidates, NativeHandle, Vocabulary, library
from cllm.bindings.vocabulary import c_string
from tools.tiny_vocabulary import byte_pieces

CONTROL_TOKENS = ("<|bos|>", "<|im_end|>", "<think>", "</think>")
# Tokens are random pieces of this text, which has outputs of the grammars of llama.cpp and of the tests.
WORDS = (
    'abc abab aab xyz {"name": "role", "a":1} [1, 2.5] true false null 1. e4 Nf3 O-O Qxd5+ 12+34*x=7\n'
    "int main(void) { return 0; } // why\n- item\n- other\nThe quick brown fox. こんにちは世界 日本語 éàü αβγ 🙂🙃 "
)


def write_vocabulary(path: Path, n_pieces: int = 1200) -> Path:
    """Write a model without weights: a token for each byte, pieces of text that cut characters, control tokens."""
    draw = random.Random(5)
    data, letters = WORDS.encode(), byte_pieces()
    pieces = {
        data[start : start + draw.choice((2, 2, 3, 4, 6))]
        for start in (draw.randrange(len(data) - 6) for _ in range(n_pieces))
    }
    spelled = ["".join(letters[byte] for byte in piece) for piece in sorted(pieces)]
    tokens = [*letters, *spelled, *CONTROL_TOKENS]
    n_text = len(tokens) - len(CONTROL_TOKENS)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([normal] * n_text + [control] * len(CONTROL_TOKENS))
    writer.add_token_merges([f"{CONTROL_TOKENS[0]} {CONTROL_TOKENS[1]}"])  # never applies
    writer.add_bos_token_id(n_text)
    writer.add_eos_token_id(n_text + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class LlamaGrammar(NativeHandle):
    """`llama_sampler_init_grammar`.  Only for harmless grammars: a few bytes can hang llama.cpp.

    Raises
    ------
    ValueError
        llama.cpp cannot read the grammar.
    """

    def __init__(self, vocab: Vocabulary, text: str) -> None:
        lib = library()
        init = ctypes.PyDLL(str(lib.path)).llama_sampler_init_grammar
        init.restype = lib.llama_sampler_chain_init.restype
        init.argtypes = (type(vocab._pointer), ctypes.c_char_p, ctypes.c_char_p)
        pointer = init(vocab._pointer, c_string("grammar", text), c_string("root", "root"))
        if not pointer:
            raise ValueError(text)
        super().__init__(pointer, lib.llama_sampler_free, parent=vocab._model)
        self._apply, self._accept = lib.llama_sampler_apply, lib.llama_sampler_accept
        self._ids = np.arange(vocab.n_tokens, dtype=np.int32)

    def mask(self) -> NDArray[np.bool_]:
        """Return the tokens that may come next: bool, shape `(n_vocab,)`."""
        candidates = Candidates(self._ids, np.zeros(len(self._ids), np.float32))
        self._apply(self._pointer, candidates.struct)
        return np.isfinite(candidates.logits)

    def accept(self, token: int) -> None:
        """Advance by a token of the mask; any other ends the process."""
        self._accept(self._pointer, token)


def grammars_of(source: Path) -> dict[str, str]:
    """The files of `grammars/` of llama.cpp, and every grammar in test-grammar-integration.cpp."""
    found = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted((source / "grammars").glob("*.gbnf"))
    }
    cpp = (source / "tests" / "test-grammar-integration.cpp").read_text(encoding="utf-8")
    texts = [text for text in re.findall(r'R"""\((.*?)\)"""', cpp, re.S) if "::=" in text]
    return found | {f"integration test {i}": text for i, text in enumerate(texts)}


# Atoms of random grammars.  Token references are left out: one behind a character ends llama.cpp's process.
ATOMS = (
    '"a"', '"ab"', '"abc"', "[a-z]", "[^a]", r"[^a-b\n]", ".", "[0-9]", '"é"', "[α-ω]", "[ぁ-ゟ]", '"日本"',
    r'"\x41\u00e9\n"', r'"\""', '("(" root ")")',
)  # fmt: skip
TIMES = ("", "", "", "", "", "+", "{2}", "{1,}", "{1,4}", "{3}")
OPTIONAL = ("*", "?", "{0,3}", "{0,5}")


def random_grammar(draw: random.Random) -> str:
    """Return a grammar of four rules; each refers to later ones, and to root only behind a bracket.

    Parts that may be empty are never repeated: llama.cpp would follow too many stacks at once.
    """
    empty: dict[str, bool] = {}
    lines = list[str]()
    for name in ("z", "y", "x", "root"):
        atoms = [(atom, False) for atom in ATOMS] + list(empty.items()) * 3

        def part(atoms: list[tuple[str, bool]] = atoms) -> tuple[str, bool]:
            choices = [draw.choice(atoms) for _ in range(draw.choice((1, 1, 1, 1, 2, 3)))]
            text, is_empty = " | ".join(text for text, _ in choices), any(e for _, e in choices)
            text = text if len(choices) == 1 else f"({text})"
            if is_empty:
                return text, True
            if draw.random() < 0.2:
                return text + draw.choice(OPTIONAL), True
            return text + draw.choice(TIMES), False

        sequences = [[part() for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.1:
            sequences.append([('""', True)])
        empty[name] = any(all(e for _, e in sequence) for sequence in sequences)
        body = " | ".join(" ".join(text for text, _ in sequence) for sequence in sequences)
        lines.append(f"{name} ::= {body}")
    return "\n".join(reversed(lines))
