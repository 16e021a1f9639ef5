"""Train a layer for multi-token prediction (MTP) on the embedded model, which stays as it is.

The layer computes, from the hidden state of a position and the next token, the token after that.  It learns the
embedded model's own probabilities.  It also learns to continue from its own hidden states, because a second draft
has no other.  `mtp_model` joins both to a file that llama.cpp loads.

    pip install torch==2.13.0 numpy gguf
    python -m tools.train_mtp --output tests/models/mtp_layer.npz     # about ten minutes, 2 cores
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from tools.train_model import Examples, Phase, learn, learning_rate_at, load
from tools.training_network import N_EMBD, RMS_EPS, Block, Transformer

N_FF = 128
# Loss weights of the first, second and third draft.
WEIGHTS = (1.0, 0.6, 0.4)
PHASE = Phase(192, 12, 0, 90, 60, 0.3, p_dialogue=0.35, p_greeting=0.1)
P_OTHER = 0.1  # loss weight of tokens outside answers


class MtpLayer(nn.Module):
    """The layer as llama.cpp's `glm4moe` computes it, without routed experts."""

    def __init__(self) -> None:
        super().__init__()
        self.enorm = nn.RMSNorm(N_EMBD, eps=RMS_EPS)
        self.hnorm = nn.RMSNorm(N_EMBD, eps=RMS_EPS)
        self.eh_proj = nn.Linear(2 * N_EMBD, N_EMBD, bias=False)
        self.block = Block(N_FF)
        self.shared_head_norm = nn.RMSNorm(N_EMBD, eps=RMS_EPS)

    def forward(self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return hidden states, `(n_rows, n_tokens, n_embd)`; `hidden` are those before each token."""
        both = torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1)
        x = self.block(self.eh_proj(both), cos, sin)
        return self.shared_head_norm(x)


def shifted(hidden: Tensor) -> Tensor:
    """Return the hidden state of the position before each position; zeros before the first."""
    return F.pad(hidden[:, :-1], (0, 0, 1, 0))


def train(trunk: Transformer, layer: MtpLayer, n_steps: int, seed: int) -> None:
    """Train the layer, and print the share of tokens that it guesses as the model chooses them."""
    trunk.requires_grad_(False)
    examples = Examples(seed)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    right: list[list[float]] = []
    for step in range(n_steps):
        inputs, _, asked = examples.batch(PHASE)
        cos, sin = trunk.cos[: inputs.shape[1]], trunk.sin[: inputs.shape[1]]
        with torch.no_grad():
            hidden = trunk.hidden(inputs)
            wanted = trunk.output(hidden)
            embedded = trunk.token_embd(inputs)
        weight = (asked > 0) + P_OTHER
        loss, shares = torch.zeros(()), []
        for share in WEIGHTS:
            hidden = layer(shifted(hidden), embedded, cos, sin)
            guessed = trunk.output(hidden)
            each = F.kl_div(
                guessed.log_softmax(-1), wanted.log_softmax(-1), reduction="none", log_target=True
            ).sum(-1)
            loss = loss + share * (each * weight).sum() / weight.sum()
            same = (guessed.argmax(-1) == wanted.argmax(-1))[asked > 0]
            shares.append(same.float().mean().item())
        learn(layer, [(optimizer, 3e-3)], learning_rate_at(step, n_steps), loss)
        right.append(shares)
        if (step + 1) % 50 == 0:
            means = " ".join(f"{mean:.3f}" for mean in np.mean(right[-50:], axis=0))
            print(
                f"step {step + 1}/{n_steps} right {means} {time.monotonic() - started:.0f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("tests/models/mtp_layer.npz"))
    parser.add_argument("--model", type=Path, default=Path("cllm/models/cllm-tiny.gguf"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=20261129)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    trunk, layer = Transformer(), MtpLayer()
    load(trunk, arguments.model)
    train(trunk, layer, arguments.steps, arguments.seed)
    weights = {name: tensor.numpy() for name, tensor in layer.state_dict().items()}
    np.savez_compressed(
        arguments.output,
        **{
            name: w.astype(np.float16 if w.ndim == 2 else np.float32) for name, w in weights.items()
        },
    )


if __name__ == "__main__":
    main()
