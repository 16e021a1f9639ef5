#!/usr/bin/env python3
"""Train the embedded model (`cllm/models/cllm-tiny.gguf`) and measure what it can do.

A byte-level transformer of the llama architecture learns four tasks whose right answers a test can
compute: sums, copying, reversing and counting.  Every test of isolation in this project compares a
stream with such an answer, so the model has to be *confidently* right: the report measures the
margin between the best and the second-best logit as well as the accuracy.

Training rows are packed with several examples each, without masking them from one another.  That
is on purpose: whatever stands before a question is a distraction the model learns to ignore, which
is what the tests of shared prefixes need.

Questions whose hash falls into one bucket of twenty are never trained on (sums excepted: all 10,000
are trained), so that the accuracy of the other tasks is measured on questions training never saw.

    pip install torch==2.13.0 numpy gguf
    python tools/train_model.py --output cllm/models/cllm-tiny.gguf     # about half an hour, 2 cores

torch is needed for this script and for nothing else in the project.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

# --- Vocabulary ------------------------------------------------------------------------------
# 256 byte tokens, then the control tokens.  `<|im_end|>` ends every answer.
BOS, END, START, ANSWER = 256, 257, 258, 259
CONTROL_TOKENS = ("<|bos|>", "<|im_end|>", "<|im_start|>", "<|answer|>")
N_VOCAB = 256 + len(CONTROL_TOKENS)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# --- Shape -----------------------------------------------------------------------------------
N_LAYER, N_EMBD, N_HEAD, N_FF = 4, 128, 4, 384
N_ROT = N_EMBD // N_HEAD
N_CTX_TRAIN = 2048
ROPE_BASE = 10_000.0
RMS_EPS = 1e-5

# --- Tasks -----------------------------------------------------------------------------------
HELD_OUT_BUCKETS = 20
MAX_REPEAT_BYTES = 48
MAX_REVERSE_LETTERS = 12
MAX_COUNT = 999
MAX_NOTE_TOKENS = 400

_COMMON_HAN = [chr(c) for c in range(0x4E00, 0x9FA6)]
_EMOJI = [
    chr(c)
    for lo, hi in ((0x1F300, 0x1F650), (0x1F680, 0x1F6D3), (0x1F900, 0x1F9FF), (0x2600, 0x26FF))
    for c in range(lo, hi)
]
_LATIN = [chr(c) for c in range(0xC0, 0x250)]
_GREEK_CYRILLIC_KANA = [
    chr(c)
    for lo, hi in ((0x391, 0x3CA), (0x410, 0x450), (0x3041, 0x30FF), (0x5D0, 0x5EB), (0x627, 0x64B))
    for c in range(lo, hi)
]
_LOWER = [chr(c) for c in range(97, 123)]
_LETTERS = [chr(c) for c in (*range(65, 91), *range(97, 123))]
_DIGITS = [chr(c) for c in range(48, 58)]
_PRINTABLE = [chr(c) for c in range(32, 127)]
_PUNCTUATION = [
    chr(c)
    for lo, hi in (
        (0x2010, 0x2040),
        (0x3000, 0x3020),
        (0xFF01, 0xFF5F),
        (0x20A0, 0x20C0),
        (0x2190, 0x2200),
    )
    for c in range(lo, hi)
]
# Any code point of two, three or four bytes alike: copying must not depend on the alphabet.
_ANY = [
    chr(c)
    for c in (
        *range(0x80, 0x800, 3),
        *range(0x800, 0xD800, 80),
        *range(0xE000, 0x10000, 60),
        *range(0x10000, 0x110000, 1500),
    )
]
_ALPHABETS = (
    (_LOWER, 4),
    (_LETTERS, 2),
    (_DIGITS, 2),
    (_PRINTABLE, 3),
    (_COMMON_HAN, 4),
    (_EMOJI, 3),
    (_LATIN, 1),
    (_GREEK_CYRILLIC_KANA, 2),
    (_PUNCTUATION, 1),
    (_ANY, 4),
)
_ALPHABET_CHOICES = [alphabet for alphabet, weight in _ALPHABETS for _ in range(weight)]


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a task and its answer, both as plain text."""

    task: str
    prompt: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Whether training must not see it.  Every sum may be trained on."""
        return self.task != "sum" and zlib.crc32(self.prompt.encode()) % HELD_OUT_BUCKETS == 0


def _random_text(rng: random.Random, max_bytes: int, min_chars: int = 1) -> str:
    """Text of one to three alphabets, runs and repeated parts included, without newlines."""
    alphabets = rng.choices(_ALPHABET_CHOICES, k=rng.choice((1, 1, 1, 2, 3)))
    style = rng.random()
    n_chars = rng.randint(min_chars, max(min_chars, rng.choice((4, 8, 16, 32, max_bytes))))
    if style < 0.10:  # few distinct characters: copying by content alone fails here
        pool = [rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 3))]
        chars = rng.choices(pool, k=n_chars)
    elif style < 0.20:  # words
        words = ["".join(rng.choices(_LOWER, k=rng.randint(1, 8))) for _ in range(n_chars // 4 + 1)]
        chars = list(" ".join(words))
    elif style < 0.35:  # sentences: words of any script, spaces, a punctuation mark here and there
        words = [
            "".join(rng.choices(rng.choice(_ALPHABET_CHOICES), k=rng.randint(1, 6)))
            + (rng.choice(_PUNCTUATION + [".", ",", "!", "?"] * 30) if rng.random() < 0.3 else "")
            for _ in range(n_chars // 3 + 1)
        ]
        chars = list(rng.choice((" ", " ", "")).join(words))
    elif style < 0.40:  # text that looks like a question
        chars = list(
            rng.choice(
                (
                    f"{rng.randint(0, 99)}+{rng.randint(0, 99)}=",
                    "repeat:",
                    "reverse:",
                    "note:",
                    f"count:{rng.randint(0, 99)}..{rng.randint(0, 99)}",
                )
            )
            + "".join(rng.choices(_LOWER, k=rng.randint(0, 6)))
        )
    else:
        chars = [rng.choice(rng.choice(alphabets)) for _ in range(n_chars)]
    n_bytes, kept = 0, []
    for char in chars:
        n_bytes += len(char.encode())
        if n_bytes > max_bytes:
            break
        kept.append(char)
    return "".join(kept) or "x"


def make_sum(rng: random.Random) -> Question:
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    return Question("sum", f"{a}+{b}=", str(a + b))


def make_repeat(rng: random.Random) -> Question:
    text = _random_text(rng, MAX_REPEAT_BYTES)
    return Question("repeat", f"repeat:{text}", text)


def make_reverse(rng: random.Random) -> Question:
    word = "".join(
        rng.choices(
            _LETTERS if rng.random() < 0.3 else _LOWER, k=rng.randint(1, MAX_REVERSE_LETTERS)
        )
    )
    if rng.random() < 0.1:
        word = "".join(rng.choices(word[:2], k=len(word)))
    return Question("reverse", f"reverse:{word}", word[::-1])


def make_count(rng: random.Random, max_numbers: int = 12, p_long: float = 0.0) -> Question:
    n_numbers = min(int(math.exp(rng.uniform(0, math.log(max_numbers + 1)))), max_numbers)
    if rng.random() < p_long:
        n_numbers = rng.randint(1, max_numbers)
    highest = 99 if n_numbers < 100 and rng.random() < 0.4 else MAX_COUNT
    first = rng.randint(0, highest + 1 - n_numbers)
    if rng.random() < 0.15:  # past 9 or 99, where the numbers grow longer: rare otherwise
        first = max(0, rng.choice((10, 100)) - rng.randint(1, n_numbers))
    last = first + n_numbers - 1
    answer = " ".join(str(n) for n in range(first, last + 1))
    return Question("count", f"count:{first}..{last}", answer)


def make_note(rng: random.Random, max_tokens: int) -> str:
    """A head that the answer must not depend on."""
    budget = rng.randint(1, max_tokens)
    lines: list[str] = []
    while budget > 0:
        text = _random_text(rng, budget, min_chars=min(budget, 24))
        lines.append(text)
        budget -= len(text.encode())
    return "note:" + "".join(lines) + "\n"


def encode_example(
    questions: list[Question], note: str, chat: bool, system: str | None
) -> tuple[list[int], list[int]]:
    """Token ids of one example and, for each, 1 where the *next* token is part of an answer."""
    tokens, is_asked = [BOS], [0]

    def say(part: list[int], asked: bool) -> None:
        if asked:
            is_asked[-1] = 1
        tokens.extend(part)
        is_asked.extend([int(asked)] * (len(part) - 1) + [0])

    def bytes_of(text: str) -> list[int]:
        return list(text.encode())

    if chat:
        if system is not None:
            say([START, *bytes_of("system\n" + system), END, *bytes_of("\n")], asked=False)
        for question in questions:
            say(
                [
                    START,
                    *bytes_of("user\n" + note + question.prompt),
                    END,
                    *bytes_of("\n"),
                    START,
                    *bytes_of("assistant\n"),
                ],
                asked=False,
            )
            say([*bytes_of(question.answer), END], asked=True)
            say(bytes_of("\n"), asked=False)
            note = ""
    else:
        say(bytes_of(note + questions[0].prompt), asked=False)
        # Only a sum shows by itself ("=") where the question ends; elsewhere the model marks it.
        marker = [] if questions[0].task == "sum" else [ANSWER]
        say([*marker, *bytes_of(questions[0].answer), END], asked=True)
    return tokens, is_asked


def confusable_stops(tokens: list[int], asked: list[int]) -> list[int]:
    """Where an answer holds a number that ends in the same two digits as its last one.

    There a count may look finished and is not; such a place is one token in hundreds, so that
    without a weight of its own it is hardly ever learned.
    """
    ends, places, number = [], [], []
    for place in range(1, len(tokens)):
        if not asked[place - 1]:
            continue  # this token is not part of an answer
        if 48 <= tokens[place] <= 57:
            number.append(tokens[place])
            continue
        ends.append((place - 1, tuple(number[-2:])))
        number = []
        if tokens[place] == END:
            last = ends[-1][1]
            places += [p for p, digits in ends if digits and digits == last]
            ends = []
    return places


MAKERS: dict[str, Callable[[random.Random], Question]] = {
    "sum": make_sum,
    "repeat": make_repeat,
    "reverse": make_reverse,
    "count": make_count,
}


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of training: rows of `n_tokens`, examples up to that size."""

    n_tokens: int
    n_rows: int
    n_steps: int
    max_numbers: int
    max_note: int
    p_note: float
    mix: tuple[int, int, int, int] = (22, 40, 18, 20)  # sum, repeat, reverse, count
    p_long: float = 0.0  # counts of any length alike, rather than mostly short ones
    stop_weight: float = 0.0  # of the places where a count may look finished and is not
    mine_sums: bool = False  # draw every second sum from those that are known worst


class Examples:
    """An endless, seeded stream of packed training rows."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.hard_sums: list[Question] = []

    def _question(self, phase: Phase) -> Question:
        while True:
            task = self._rng.choices(tuple(MAKERS), phase.mix)[0]
            if task == "count":
                question = make_count(self._rng, phase.max_numbers, phase.p_long)
            elif task == "sum" and self.hard_sums and self._rng.random() < 0.5:
                question = self._rng.choice(self.hard_sums)
            else:
                question = MAKERS[task](self._rng)
            if not question.held_out:
                return question

    def _example(self, phase: Phase) -> tuple[list[int], list[int]]:
        chat = self._rng.random() < 0.25
        questions = [
            self._question(phase) for _ in range(self._rng.choice((1, 1, 2, 3)) if chat else 1)
        ]
        note = make_note(self._rng, phase.max_note) if self._rng.random() < phase.p_note else ""
        system = None
        if chat and self._rng.random() < 0.3:
            system = _random_text(self._rng, 60)
        return encode_example(questions, note, chat, system)

    def batch(self, phase: Phase) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets (int64) and loss weights (float32), each of shape (n_rows, n_tokens).

        Every row begins with an example: an answer whose question was cut off at the end of the
        row before would be noise.
        """
        width = phase.n_tokens + 1
        ids = torch.empty((phase.n_rows, width), dtype=torch.int64)
        weights = torch.empty((phase.n_rows, width))
        for row in range(phase.n_rows):
            row_tokens: list[int] = []
            row_weights: list[float] = []
            while len(row_tokens) < width:
                tokens, asked = self._example(phase)
                # A long answer is many easy tokens; the square root keeps it from drowning others.
                weight = 1.0 / math.sqrt(max(1, sum(asked)))
                row_tokens += tokens
                row_weights += [weight * flag for flag in asked]
                if phase.stop_weight:
                    start = len(row_tokens) - len(tokens)
                    for place in confusable_stops(tokens, asked):
                        row_weights[start + place] = phase.stop_weight
            ids[row] = torch.tensor(row_tokens[:width])
            weights[row] = torch.tensor(row_weights[:width])
        return ids[:, :-1], ids[:, 1:], weights[:, :-1]


# --- Network ---------------------------------------------------------------------------------
class Block(nn.Module):
    """Attention and SwiGLU, as llama.cpp's `llama` architecture computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(N_EMBD, eps=RMS_EPS)
        self.attn_q = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.attn_k = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.attn_v = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.attn_output = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.ffn_norm = nn.RMSNorm(N_EMBD, eps=RMS_EPS)
        self.ffn_gate = nn.Linear(N_EMBD, N_FF, bias=False)
        self.ffn_up = nn.Linear(N_EMBD, N_FF, bias=False)
        self.ffn_down = nn.Linear(N_FF, N_EMBD, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n_rows, n_tokens, _ = x.shape
        h = self.attn_norm(x)
        q, k, v = (
            proj(h).view(n_rows, n_tokens, N_HEAD, N_ROT).transpose(1, 2)
            for proj in (self.attn_q, self.attn_k, self.attn_v)
        )
        attended = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        x = x + self.attn_output(attended.transpose(1, 2).reshape(n_rows, n_tokens, N_EMBD))
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs, llama.cpp's `LLAMA_ROPE_TYPE_NORM`."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(N_VOCAB, N_EMBD)
        self.blk = nn.ModuleList(Block() for _ in range(N_LAYER))
        self.output_norm = nn.RMSNorm(N_EMBD, eps=RMS_EPS)
        self.output = nn.Linear(N_EMBD, N_VOCAB, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(parameter, std=0.05 / math.sqrt(2 * N_LAYER) if deep else 0.05)
        frequencies = ROPE_BASE ** (-torch.arange(0, N_ROT, 2) / N_ROT)
        angles = torch.outer(torch.arange(N_CTX_TRAIN), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states, float32 (n_rows, n_tokens, n_embd)."""
        x = self.token_embd(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for block in self.blk:
            x = block(x, cos, sin)
        return self.output_norm(x)


# --- Optimizer -------------------------------------------------------------------------------
class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by five Newton-Schulz steps (Jordan et al. 2024)."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                buffer = state.setdefault("momentum", torch.zeros_like(parameter))
                buffer.mul_(group["momentum"]).add_(parameter.grad)
                update = parameter.grad + group["momentum"] * buffer
                x = update / (update.norm() + 1e-7)
                tall = x.shape[0] > x.shape[1]
                x = x.T if tall else x
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                x = x.T if tall else x
                scale = math.sqrt(max(1.0, parameter.shape[0] / parameter.shape[1]))
                parameter.mul_(1 - 0.02 * group["lr"]).add_(x, alpha=-group["lr"] * scale)


def learning_rate_at(step: int, n_steps: int) -> float:
    """Factor on the peak rate: a short warm-up, a plateau, then linearly to zero."""
    return min(1.0, (step + 1) / 50, (n_steps - step) / (0.5 * n_steps))


# --- Measurement -----------------------------------------------------------------------------
@dataclass(slots=True)
class Tally:
    """Exact answers and the smallest logit margin over them."""

    n_asked: int = 0
    n_right: int = 0
    min_margin: float = math.inf

    def __str__(self) -> str:
        return f"{self.n_right}/{self.n_asked} (margin {self.min_margin:.1f})"


@torch.no_grad()
def measure(model: Transformer, examples: list[tuple[list[int], list[int]]]) -> Tally:
    """Greedy accuracy: with every argmax right, greedy decoding reproduces the answer exactly."""
    tally = Tally()
    examples = sorted(examples, key=lambda e: len(e[0]))
    start = 0
    while start < len(examples):
        width = len(examples[min(start + 255, len(examples) - 1)][0])
        count = max(1, min(256, 32768 // width))
        group = examples[start : start + count]
        start += count
        width = max(len(tokens) for tokens, _ in group)
        ids = torch.full((len(group), width), END)
        asked = torch.zeros((len(group), width), dtype=torch.bool)
        for row, (tokens, flags) in enumerate(group):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            asked[row, : len(flags)] = torch.tensor(flags, dtype=torch.bool)
        rows, columns = asked[:, :-1].nonzero(as_tuple=True)
        logits = model.output(model.hidden(ids)[rows, columns])
        target = ids[rows, columns + 1]
        top2 = logits.topk(2, dim=-1)
        right = top2.indices[:, 0] == target
        wrong_rows = set(rows[~right].tolist())
        tally.n_asked += len(group)
        tally.n_right += len(group) - len(wrong_rows)
        margins = (top2.values[:, 0] - top2.values[:, 1])[right]
        if len(margins):
            tally.min_margin = min(tally.min_margin, margins.min().item())
    return tally


ALL_SUMS = [Question("sum", f"{a}+{b}=", str(a + b)) for a in range(100) for b in range(100)]


@torch.no_grad()
def hardest_sums(model: Transformer, n: int) -> list[Question]:
    """The sums that the model answers wrongly or with the smallest margins."""
    margins = torch.empty(len(ALL_SUMS))
    by_length: dict[int, list[int]] = {}
    examples = [encode_example([question], "", False, None) for question in ALL_SUMS]
    for index, (tokens, _) in enumerate(examples):
        by_length.setdefault(len(tokens), []).append(index)
    for indices in by_length.values():
        ids = torch.tensor([examples[i][0] for i in indices])
        asked = torch.tensor([examples[i][1] for i in indices], dtype=torch.bool)[:, :-1]
        logits = model.output(model.hidden(ids))[:, :-1]
        target = ids[:, 1:, None]
        right = logits.gather(-1, target)[..., 0]
        best_other = logits.scatter(-1, target, -math.inf).amax(-1)
        margins[indices] = (right - best_other).masked_fill(~asked, math.inf).amin(1)
    return [ALL_SUMS[index] for index in margins.argsort()[:n].tolist()]


def held_out_questions(
    maker: Callable[[random.Random], Question], n: int, seed: int
) -> list[Question]:
    rng = random.Random(seed)
    kept: list[Question] = []
    while len(kept) < n:
        question = maker(rng)
        if question.held_out or question.task == "sum":
            kept.append(question)
    return kept


def evaluate(model: Transformer, n: int, max_numbers: int, max_note: int) -> dict[str, Tally]:
    """Accuracy per task on held-out questions: bare, after a note, and through the chat template."""
    report: dict[str, Tally] = {}
    rng = random.Random(7)
    makers = dict(MAKERS)
    makers["count"] = lambda r: make_count(r, max_numbers)
    for task, maker in makers.items():
        questions = held_out_questions(maker, n, seed=zlib.crc32(task.encode()))
        if task == "sum":
            questions = ALL_SUMS
        report[task] = measure(model, [encode_example([q], "", False, None) for q in questions])
        report[f"{task}, note"] = measure(
            model,
            [
                encode_example([q], make_note(rng, max_note), False, None)
                for q in random.Random(3).sample(questions, n)
            ],
        )
        report[f"{task}, chat"] = measure(
            model,
            [encode_example([q], "", True, None) for q in random.Random(3).sample(questions, n)],
        )
    return report


# --- Export ----------------------------------------------------------------------------------
def _byte_pieces() -> list[str]:
    """GPT-2's printable stand-in for each byte, the alphabet of byte-level BPE vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    pieces, n_moved = [""] * 256, 0
    for byte in range(256):
        if byte in printable:
            pieces[byte] = chr(byte)
        else:
            pieces[byte] = chr(256 + n_moved)
            n_moved += 1
    return pieces


def export(model: Transformer, path: Path, report: dict[str, Tally]) -> None:
    """Write the model as GGUF: matrices float16, norms float32."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("cllm-tiny")
    writer.add_description("Sums, copying, reversing and counting, for cllm's demo and tests")
    writer.add_license("MIT")
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD)
    writer.add_rope_dimension_count(N_ROT)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_vocab_size(N_VOCAB)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*_byte_pieces(), *CONTROL_TOKENS])
    writer.add_token_types(
        [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(CONTROL_TOKENS)
    )
    # llama.cpp wants merges, and gguf drops an empty list: this one can never apply.
    writer.add_token_merges([f"{CONTROL_TOKENS[0]} {CONTROL_TOKENS[1]}"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(END)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    writer.add_string(
        "cllm.accuracy",
        json.dumps({name: [tally.n_right, tally.n_asked] for name, tally in report.items()}),
    )
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        writer.add_tensor(name, array.astype(np.float16 if array.ndim == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(model: Transformer, path: Path) -> None:
    """Take the weights of a checkpoint or of an exported model."""
    if path.suffix != ".gguf":
        model.load_state_dict(torch.load(path))
        return
    import gguf

    tensors = {
        t.name: torch.from_numpy(t.data.astype(np.float32)) for t in gguf.GGUFReader(path).tensors
    }
    model.load_state_dict(tensors)


def train(
    model: Transformer, phases: list[Phase], seed: int, peak: float, log: Callable[[str], None]
) -> None:
    """Run `phases` under one schedule of the learning rate, with `peak` as a factor on it."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("blk.")]
    others = [p for n, p in model.named_parameters() if not (p.dim() == 2 and n.startswith("blk."))]
    rates = [
        (Muon(matrices, lr=0.02), 0.02 * peak),
        (torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01), 4e-3 * peak),
    ]
    examples = Examples(seed)
    n_steps = sum(phase.n_steps for phase in phases)
    step, started, losses = 0, time.monotonic(), []
    for phase in phases:
        for _ in range(phase.n_steps):
            if phase.mine_sums and step % 25 == 0:
                examples.hard_sums = hardest_sums(model, 1000)
            inputs, targets, weights = examples.batch(phase)
            for optimizer, rate in rates:
                optimizer.param_groups[0]["lr"] = rate * learning_rate_at(step, n_steps)
            rows, columns = weights.nonzero(as_tuple=True)
            logits = model.output(model.hidden(inputs)[rows, columns])
            weight = weights[rows, columns]
            loss = (
                F.cross_entropy(logits, targets[rows, columns], reduction="none") * weight
            ).sum()
            loss = loss / weight.sum()
            model.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, _ in rates:
                optimizer.step()
            losses.append(loss.item())
            step += 1
            if step % 50 == 0:
                log(
                    f"step {step}/{n_steps} loss {np.mean(losses[-50:]):.4f} "
                    f"{time.monotonic() - started:.0f} s"
                )
            if step % 250 == 0:
                report = evaluate(model, 200, phase.max_numbers, phase.max_note)
                log("  " + "; ".join(f"{name} {tally}" for name, tally in report.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("cllm/models/cllm-tiny.gguf"))
    parser.add_argument("--checkpoint", type=Path, help="save the weights after every stage")
    parser.add_argument("--resume", type=Path, help="start from such a checkpoint, or a model")
    parser.add_argument("--stage", type=int, default=0, help="the first stage to run")
    parser.add_argument("--seed", type=int, default=20261120)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    model = Transformer()
    stages = [
        # Every task is learned here, except the last few hundred sums and where long counts end.
        (
            1.0,
            [
                Phase(256, 48, 1400, 12, 60, 0.2),
                Phase(512, 24, 500, 60, 300, 0.3),
                Phase(1280, 10, 500, 220, 400, 0.35),
            ],
        ),
        # The sums, and copying of any script.
        (
            0.5,
            [
                Phase(256, 48, 300, 30, 60, 0.15, (62, 26, 4, 8), 0.0, 1.0, mine_sums=True),
                Phase(1280, 10, 350, 220, 400, 0.3, (52, 24, 4, 20), 0.7, 1.0, mine_sums=True),
            ],
        ),
        # Where long counts end.
        (0.5, [Phase(1280, 10, 420, 220, 400, 0.25, (44, 18, 3, 35), 0.8, 3.0, mine_sums=True)]),
        # All of it once more, gently.
        (
            0.4,
            [
                Phase(256, 48, 100, 40, 60, 0.15, (40, 36, 6, 18), 0.3, 1.5, mine_sums=True),
                Phase(1280, 10, 400, 220, 400, 0.25, (34, 34, 6, 26), 0.7, 2.0, mine_sums=True),
            ],
        ),
        # The last sums.
        (0.1, [Phase(512, 24, 120, 100, 300, 0.2, (50, 26, 4, 20), 0.5, 1.5, mine_sums=True)]),
    ]

    def log(line: str) -> None:
        print(line, flush=True)

    log(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    if arguments.resume:
        load(model, arguments.resume)
    before: dict[str, Tensor] = {}
    for number, (peak, phases) in enumerate(stages):
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        if number >= arguments.stage:
            train(model, phases, arguments.seed + number, peak, log)
            if arguments.checkpoint:
                torch.save(model.state_dict(), arguments.checkpoint)
    # The last stage knows the sums better, the one before it where counts end; their mean knows both.
    last = model.state_dict()
    model.load_state_dict({name: (before[name] + last[name]) / 2 for name in last})
    report = evaluate(model, 2000, 220, MAX_NOTE_TOKENS)
    for name, tally in report.items():
        log(f"{name}: {tally}")
    export(model, arguments.output, report)
    log(f"{arguments.output}: {arguments.output.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
