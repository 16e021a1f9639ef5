"""Train the embedded model (`cllm/models/cllm-tiny.gguf`) and measure what it can do.

A byte-level transformer of the llama architecture learns four tasks whose right answers a test can
compute: sums, copying, reversing and counting.  Every test of isolation in this project compares a stream
with such an answer, so that the margins of the model must be large.  The report has the accuracy, and the
margin between the best and the second-best logit.  The model also learns dialogues with tools and thoughts.

Training rows are packed with several examples each, which are not masked from one another.  So the model
learns to ignore the text before a question, which the tests of shared prefixes need.  The tasks are in
`training_tasks`, `training_dialogues`, `training_pictures` and `training_greetings`, the network in
`training_network`, the report in `training_measure`.

    pip install torch==2.13.0 numpy gguf
    python -m tools.train_model --output cllm/models/cllm-tiny.gguf     # about three hours, 2 cores

torch is needed for this program and for nothing else in the project.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from tools.tiny_vocabulary import CHAT_TEMPLATE, N_VOCAB, add_vocabulary
from tools.training_dialogues import dialogue_example
from tools.training_greetings import greeting_example
from tools.training_measure import Tally, evaluate, hardest_sums
from tools.training_network import (
    N_CTX_TRAIN,
    N_EMBD,
    N_FF,
    N_HEAD,
    N_LAYER,
    N_ROT,
    RMS_EPS,
    ROPE_BASE,
    Transformer,
)
from tools.training_pictures import picture_example, unseen_example
from tools.training_tasks import (
    MAKERS,
    MAX_NOTE_TOKENS,
    Example,
    Question,
    confusable_stops,
    encode_example,
    make_count,
    make_note,
    random_text,
)

SUMS_STAGE = 6
# Shares of the weights at the ends of stages, by the stage that they replace.  Stage 6 is better at sums, the one
# before it at the ends of counts.  Stages 8 to 10 know pictures and greetings, and stage 6 is better at tools.
BLENDS = {
    6: {5: 0.5, 6: 0.5},
    9: {6: 0.13, 8: 0.35, 9: 0.52},
    10: {6: 0.12, 8: 0.28, 9: 0.4, 10: 0.2},
}


# --- Rows of examples ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Phase:
    """Phase of training: `n_steps` batches of `n_rows` rows; examples are cut off after `n_tokens` tokens."""

    n_tokens: int
    n_rows: int
    n_steps: int
    max_numbers: int
    max_note: int
    p_note: float
    mix: tuple[int, int, int, int] = (22, 40, 18, 20)  # sum, repeat, reverse, count
    p_long: float = 0.0  # share of counts with uniform lengths; the others are mostly short
    stop_weight: float = 0.0  # loss weight of the places that `confusable_stops` returns
    mine_sums: bool = False  # draw every second sum from the 1,000 with the smallest margins
    p_dialogue: float = 0.0  # share of examples that are dialogues with tools and thoughts
    p_picture: float = 0.0  # share of examples with pictures
    p_greeting: float = (
        0.0  # share of greetings, and of rows that begin with a picture that is not there
    )


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

    def _example(self, phase: Phase, is_first: bool) -> Example:
        if is_first and self._rng.random() < phase.p_greeting:
            return unseen_example(self._rng)
        kind = self._rng.random()
        for share, make in (
            (phase.p_dialogue, dialogue_example),
            (phase.p_picture, picture_example),
            (phase.p_greeting, greeting_example),
        ):
            if (kind := kind - share) < 0:
                return make(self._rng)
        chat = self._rng.random() < 0.25
        questions = [
            self._question(phase) for _ in range(self._rng.choice((1, 1, 2, 3)) if chat else 1)
        ]
        note = make_note(self._rng, phase.max_note) if self._rng.random() < phase.p_note else ""
        system = None
        if chat and self._rng.random() < 0.3:
            system = random_text(self._rng, 60)
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
                example = self._example(phase, not row_tokens)
                tokens, asked = example.tokens, example.asked
                # A long answer has many easy tokens; the square root limits its share of the loss.
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


# --- Optimizer -------------------------------------------------------------------------------
class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by five Newton-Schulz steps (Jordan et al. 2024)."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
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


def optimizers_of(
    model: nn.Module, others_lr: float, factor: float = 1.0
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Return Muon for the matrices of a model's layers, AdamW for the others, and the peak rate of each."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.dim() == 2 and name.startswith("blk.")
            (matrices if is_matrix else others).append(parameter)
    adam = torch.optim.AdamW(others, lr=others_lr, betas=(0.9, 0.98), weight_decay=0.01)
    return [(Muon(matrices, lr=0.02), 0.02 * factor), (adam, others_lr * factor)]


def learn(
    network: nn.Module,
    rates: list[tuple[torch.optim.Optimizer, float]],
    factor: float,
    loss: Tensor,
) -> None:
    """Make one step of all optimizers, with `factor` on their peak rates; clip the gradients of `network`."""
    for optimizer, rate in rates:
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    for optimizer, _ in rates:
        optimizer.step()


def learning_rate_at(step: int, n_steps: int) -> float:
    """Factor on the peak rate: a short warm-up, a plateau, then linearly to zero."""
    return min(1.0, (step + 1) / 50, (n_steps - step) / (0.5 * n_steps))


# --- Files -----------------------------------------------------------------------------------
def export(model: Transformer, path: Path, report: dict[str, Tally]) -> None:
    """Write the model as GGUF: matrices float16, norms float32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("cllm-tiny")
    writer.add_description("Sums, copying, counting and calls of tools, for cllm's demo and tests")
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
    add_vocabulary(writer)
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


def copy_of(model: Transformer) -> dict[str, Tensor]:
    """Return a copy of the weights."""
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def blended(ended: dict[int, dict[str, Tensor]], shares: dict[int, float]) -> dict[str, Tensor]:
    """Return the weighted mean of the weights of several stages; the shares add up to 1."""
    names = next(iter(ended.values()))
    return {
        name: torch.stack([share * ended[stage][name] for stage, share in shares.items()]).sum(0)
        for name in names
    }


def load(model: Transformer, path: Path) -> None:
    """Load the weights of an exported model."""
    tensors = {
        t.name: torch.from_numpy(t.data.astype(np.float32)) for t in gguf.GGUFReader(path).tensors
    }
    model.load_state_dict(tensors)


# --- Training --------------------------------------------------------------------------------
def train(
    model: Transformer, phases: list[Phase], seed: int, peak: float, log: Callable[[str], None]
) -> None:
    """Run `phases` under one schedule of the learning rate, with `peak` as a factor on it.

    With pictures, the embeddings of the tokens are fixed: the encoder learns to give them (`train_encoder`).
    """
    model.token_embd.requires_grad_(not any(phase.p_picture for phase in phases))
    rates = optimizers_of(model, 4e-3, peak)
    examples = Examples(seed)
    n_steps = sum(phase.n_steps for phase in phases)
    step, started, losses = 0, time.monotonic(), []
    for phase in phases:
        for _ in range(phase.n_steps):
            if phase.mine_sums and step % 25 == 0:
                examples.hard_sums = hardest_sums(model, 1000)
            inputs, targets, weights = examples.batch(phase)
            rows, columns = weights.nonzero(as_tuple=True)
            logits = model.output(model.hidden(inputs)[rows, columns])
            weight = weights[rows, columns]
            loss = (
                F.cross_entropy(logits, targets[rows, columns], reduction="none") * weight
            ).sum()
            loss = loss / weight.sum()
            learn(model, rates, learning_rate_at(step, n_steps), loss)
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
    parser.add_argument(
        "--checkpoint", type=Path, help="GGUF file for the weights after each stage"
    )
    parser.add_argument("--resume", type=Path, help="start with this GGUF file")
    parser.add_argument("--stage", type=int, default=0, help="first stage to run, from 0")
    parser.add_argument("--seed", type=int, default=20261120)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    model = Transformer()
    stages = [
        # All tasks, except the last few hundred sums and the ends of long counts.
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
        # The ends of long counts.
        (0.5, [Phase(1280, 10, 420, 220, 400, 0.25, (44, 18, 3, 35), 0.8, 3.0, mine_sums=True)]),
        # All tasks again, at a lower learning rate.
        (
            0.4,
            [
                Phase(256, 48, 100, 40, 60, 0.15, (40, 36, 6, 18), 0.3, 1.5, mine_sums=True),
                Phase(1280, 10, 400, 220, 400, 0.25, (34, 34, 6, 26), 0.7, 2.0, mine_sums=True),
            ],
        ),
        # Dialogues with tools and thoughts, and all other tasks.
        (
            0.6,
            [
                Phase(1280, 10, 700, 220, 400, 0.25, (34, 34, 6, 26), 0.7, 2.0, True, 0.6),
                Phase(1280, 10, 500, 220, 400, 0.25, (36, 32, 6, 26), 0.7, 2.0, True, 0.5),
            ],
        ),
        # The same again, at a lower learning rate.
        (
            0.5,
            [
                Phase(1280, 10, 800, 220, 400, 0.25, (40, 30, 4, 26), 0.7, 2.0, True, 0.6),
                Phase(1280, 10, 600, 220, 400, 0.25, (46, 26, 4, 24), 0.7, 2.0, True, 0.45),
            ],
        ),
        # The last sums.
        (0.1, [Phase(768, 16, 300, 100, 300, 0.2, (50, 26, 4, 20), 0.5, 1.5, True, 0.3)]),
        # Pictures and greetings, and all other tasks.
        (
            0.3,
            [Phase(640, 20, 650, 80, 200, 0.2, (44, 26, 6, 24), 0.7, 2.0, True, 0.25, 0.35, 0.1)],
        ),
        # The same again.
        (
            0.4,
            [
                Phase(640, 20, 650, 80, 200, 0.2, (44, 26, 6, 24), 0.7, 2.0, True, 0.2, 0.4, 0.07),
                Phase(
                    1280, 10, 450, 220, 400, 0.25, (44, 26, 6, 24), 0.7, 2.0, True, 0.3, 0.25, 0.05
                ),
            ],
        ),
        # The same again, at a lower learning rate.
        (
            0.1,
            [Phase(1280, 10, 400, 220, 400, 0.25, (46, 28, 6, 20), 0.6, 2.0, True, 0.3, 0.2, 0.05)],
        ),
        # All tasks, after the blend.
        (
            0.07,
            [Phase(768, 16, 170, 120, 300, 0.2, (28, 50, 8, 14), 0.5, 1.5, True, 0.2, 0.27, 0.08)],
        ),
    ]

    def log(line: str) -> None:
        print(line, flush=True)

    log(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    if arguments.resume:
        load(model, arguments.resume)
    ended = {arguments.stage - 1: copy_of(model)}
    for number, (peak, phases) in enumerate(stages):
        if number < arguments.stage:
            continue
        train(model, phases, arguments.seed + number, peak, log)
        ended[number] = copy_of(model)
        if number in BLENDS:
            model.load_state_dict(blended(ended, BLENDS[number]))
            if number == SUMS_STAGE:
                ended[number] = copy_of(model)
        if arguments.checkpoint:
            export(model, arguments.checkpoint, {})
    report = evaluate(model, 2000, 220, MAX_NOTE_TOKENS)
    for name, tally in report.items():
        log(f"{name}: {tally}")
    export(model, arguments.output, report)
    log(f"{arguments.output}: {arguments.output.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
