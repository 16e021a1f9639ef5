"""Measure how well the embedded model does its tasks: exact answers, and margins of the logits."""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass

import torch

from tools.tiny_vocabulary import END
from tools.training_dialogues import dialogue_example
from tools.training_greetings import greeting_example
from tools.training_network import Transformer
from tools.training_pictures import picture_example
from tools.training_tasks import (
    ALL_SUMS,
    MAKERS,
    Example,
    Question,
    encode_example,
    held_out_questions,
    make_count,
    make_note,
)


@dataclass(slots=True)
class Tally:
    """Number of exact answers, and the smallest logit margin of all right tokens."""

    n_asked: int = 0
    n_right: int = 0
    min_margin: float = math.inf

    def __str__(self) -> str:
        return f"{self.n_right}/{self.n_asked} (margin {self.min_margin:.1f})"


@torch.no_grad()
def measure(model: Transformer, examples: list[Example]) -> Tally:
    """Measure the greedy accuracy: an answer is exact if the argmax is right at each of its tokens."""
    tally = Tally()
    examples = sorted(examples, key=lambda e: len(e.tokens))
    start = 0
    while start < len(examples):
        width = len(examples[min(start + 255, len(examples) - 1)].tokens)
        count = max(1, min(256, 32768 // width))
        group = examples[start : start + count]
        start += count
        width = max(len(example.tokens) for example in group)
        ids = torch.full((len(group), width), END)
        asked = torch.zeros((len(group), width), dtype=torch.bool)
        for row, example in enumerate(group):
            ids[row, : len(example.tokens)] = torch.tensor(example.tokens)
            asked[row, : len(example.asked)] = torch.tensor(example.asked, dtype=torch.bool)
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


@torch.no_grad()
def hardest_sums(model: Transformer, n: int) -> list[Question]:
    """Return the `n` sums with the smallest margins; the margin of a wrong answer is negative."""
    margins = torch.empty(len(ALL_SUMS))
    by_length: dict[int, list[int]] = {}
    examples = [encode_example([question], "", False, None) for question in ALL_SUMS]
    for index, example in enumerate(examples):
        by_length.setdefault(len(example.tokens), []).append(index)
    for indices in by_length.values():
        ids = torch.tensor([examples[i].tokens for i in indices])
        asked = torch.tensor([examples[i].asked for i in indices], dtype=torch.bool)[:, :-1]
        logits = model.output(model.hidden(ids))[:, :-1]
        target = ids[:, 1:, None]
        right = logits.gather(-1, target)[..., 0]
        best_other = logits.scatter(-1, target, -math.inf).amax(-1)
        margins[indices] = (right - best_other).masked_fill(~asked, math.inf).amin(1)
    return [ALL_SUMS[index] for index in margins.argsort()[:n].tolist()]


def evaluate(model: Transformer, n: int, max_numbers: int, max_note: int) -> dict[str, Tally]:
    """Return the accuracy by task: bare, after a note, and through the chat template.

    Questions are held out of training, except sums and dialogues.
    """
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
    calls = random.Random(8)
    report["dialogue"] = measure(model, [dialogue_example(calls) for _ in range(n)])
    report["picture"] = measure(model, [picture_example(calls) for _ in range(n)])
    report["greeting"] = measure(model, [greeting_example(calls) for _ in range(n)])
    return report
