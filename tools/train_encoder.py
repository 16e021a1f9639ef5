"""Train the image encoder of the embedded model (`cllm/models/mmproj-cllm-tiny.gguf`) and measure it.

A small vision transformer with a projector of two layers (`clip.projector_type` "mlp"), computed as libmtmd
computes it: 64 rows for a picture.  First each row learns to say what covers its patch of the picture.  Then the
rows learn to be the embeddings of the 64 characters of the picture's caption (`training_pictures`), which the
text model reads as it reads a text.  So the text model is trained first, without pictures, and stays as it is.

    pip install torch==2.13.0 numpy gguf pillow
    python -m tools.train_encoder cllm/models/cllm-tiny.gguf        # about two hours, one core

Fonts for the digits make the encoder see more kinds of them: `--fonts DejaVuSans.ttf …`.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from tools.train_model import learn, learning_rate_at, optimizers_of
from tools.training_network import N_EMBD as N_TEXT
from tools.training_pictures import (
    COLOURS,
    DIGITS,
    N_COLOUR,
    N_NAME,
    N_PLACE,
    SHAPES,
    SIDE,
    Picture,
    make_picture,
)

N_LAYER, N_EMBD, N_HEAD, N_FF = 5, 96, 4, 384
PATCH = 8
GRID = SIDE // PATCH
N_ROWS = GRID * GRID
EPS = 1e-5
THINGS = (*SHAPES, *DIGITS)
NO_THING, N_PLACES = len(THINGS), 9
N_PICTURES = 96  # of a batch
SHARPNESS = 12  # of the choice between characters
# Of captions: steps, the factor on the peak rate, and the share of their weights in the blend.
STAGES = ((4600, 0.8, 0.7), (600, 0.2, 0.3))


class Layer(nn.Module):
    """Attention over all patches, and a GELU network, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(N_EMBD, eps=EPS)
        self.attn_q = nn.Linear(N_EMBD, N_EMBD)
        self.attn_k = nn.Linear(N_EMBD, N_EMBD)
        self.attn_v = nn.Linear(N_EMBD, N_EMBD)
        self.attn_out = nn.Linear(N_EMBD, N_EMBD)
        self.ln2 = nn.LayerNorm(N_EMBD, eps=EPS)
        self.ffn_up = nn.Linear(N_EMBD, N_FF)
        self.ffn_down = nn.Linear(N_FF, N_EMBD)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        q, k, v = (
            part(h).view(len(x), N_ROWS, N_HEAD, N_EMBD // N_HEAD).transpose(1, 2)
            for part in (self.attn_q, self.attn_k, self.attn_v)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.attn_out(attended.transpose(1, 2).reshape(x.shape))
        h = F.gelu(self.ffn_up(self.ln2(x)), approximate="tanh")
        return x + self.ffn_down(h)


class Encoder(nn.Module):
    """Encoder and projector.  The names of the weights are those of the file, with "_" for "." between parts."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embd = nn.Conv2d(3, N_EMBD, PATCH, PATCH)
        self.position_embd = nn.Parameter(torch.randn(N_ROWS, N_EMBD) * 0.02)
        self.blk = nn.ModuleList(Layer() for _ in range(N_LAYER))
        # The last layer begins as if it were not there: it carries what the others have found to the rows of
        # the caption.
        nn.init.zeros_(self.blk[-1].attn_out.weight)
        nn.init.zeros_(self.blk[-1].ffn_down.weight)
        self.post_ln = nn.LayerNorm(N_EMBD, eps=EPS)
        self.mm_0 = nn.Linear(N_EMBD, N_TEXT)
        self.mm_2 = nn.Linear(N_TEXT, N_TEXT)

    def forward(self, pictures: Tensor, n_layers: int = N_LAYER) -> Tensor:
        """Return the rows of pictures, by the first layers: float32 (n, 64, n_embd of the text model)."""
        x = self.patch_embd(pictures).flatten(2).transpose(1, 2) + self.position_embd
        for layer in self.blk[:n_layers]:
            x = layer(x)
        return self.mm_2(F.gelu(self.mm_0(self.post_ln(x)), approximate="tanh"))


def as_input(pictures: Sequence[Picture]) -> Tensor:
    """Return pictures as the encoder's input: float32 (n, 3, 64, 64), -1 to 1."""
    pixels = np.stack([picture.seen() for picture in pictures])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def export(encoder: Encoder, path: Path) -> None:
    """Write the encoder as a projector of libmtmd: matrices float16, all else float32."""
    with contextlib.closing(gguf.GGUFWriter(path, "clip")) as writer:
        writer.add_name("cllm-tiny")
        writer.add_description("Sees drawn digits and shapes, for cllm's demo and tests")
        writer.add_license("MIT")
        writer.add_bool("clip.has_vision_encoder", True)
        writer.add_string("clip.projector_type", "mlp")
        writer.add_bool("clip.use_gelu", True)
        for key, value in {
            "embedding_length": N_EMBD, "attention.head_count": N_HEAD, "feed_forward_length": N_FF,
            "block_count": N_LAYER, "projection_dim": N_TEXT, "image_size": SIDE, "patch_size": PATCH,
        }.items():  # fmt: skip
            writer.add_uint32(f"clip.vision.{key}", value)
        writer.add_array("clip.vision.feature_layer", [N_LAYER])
        writer.add_float32("clip.vision.attention.layer_norm_epsilon", EPS)
        for key in ("image_mean", "image_std"):
            writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
        for name, weight in encoder.state_dict().items():
            array = weight.numpy()
            is_matrix = array.ndim > 1 and name != "position_embd"
            place = name.replace("mm_", "mm.") if name.startswith("mm_") else f"v.{name}"
            place = "v.position_embd.weight" if name == "position_embd" else place
            writer.add_tensor(place, array.astype(np.float16 if is_matrix else np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def load(encoder: Encoder, path: Path) -> None:
    """Load the weights of an exported encoder."""
    tensors = dict(encoder.state_dict())
    for tensor in gguf.GGUFReader(path).tensors:
        name = tensor.name.removeprefix("v.").replace("mm.", "mm_")
        name = name.removesuffix(".weight") if name.startswith("position_embd") else name
        tensors[name] = torch.from_numpy(tensor.data.astype(np.float32))
    encoder.load_state_dict(tensors)


# --- Training --------------------------------------------------------------------------------
def labels_of(picture: Picture) -> np.ndarray:
    """Return what covers each patch: int64 (64, 3), numbers of thing, colour and place."""
    labels = np.full((GRID, GRID, 3), (NO_THING, len(COLOURS), N_PLACES))
    left, top, width, height = picture.frame
    for thing, (x0, y0, x1, y1) in zip(picture.scene.things, picture.boxes, strict=True):
        columns = slice(
            round((left + x0 * width) / PATCH - 0.3), round((left + x1 * width) / PATCH + 0.3)
        )
        rows = slice(
            round((top + y0 * height) / PATCH - 0.3), round((top + y1 * height) / PATCH + 0.3)
        )
        labels[rows, columns] = (
            THINGS.index(thing.name), [*COLOURS].index(thing.colour),
            3 * thing.place[0] + thing.place[1],
        )  # fmt: skip
    return labels.reshape(-1, 3)


class Pictures:
    """An endless, seeded stream of pictures that are not held out."""

    def __init__(self, seed: int, fonts: Sequence[str]) -> None:
        self._rng, self._fonts = random.Random(seed), fonts

    def batch(self, n: int) -> list[Picture]:
        """Return `n` pictures."""
        found: list[Picture] = []
        while len(found) < n:
            picture = make_picture(self._rng, fonts=self._fonts)
            if not picture.is_held_out:
                found.append(picture)
        return found


Loss = Callable[[Tensor, list[Picture]], Tensor]


def train(
    encoder: Encoder, loss_of: Loss, pictures: Pictures, n_steps: int, peak: float,
    heads: nn.Module | None, log: Callable[[str], None],
) -> None:  # fmt: skip
    """Train an encoder, and the heads that a loss needs, under one schedule of the learning rate."""
    rates = optimizers_of(encoder, 2e-3, peak)
    if heads is not None:
        rates.append((torch.optim.AdamW(heads.parameters(), lr=3e-3), 3e-3))
    started, losses = time.monotonic(), list[float]()
    for step in range(n_steps):
        shown = pictures.batch(N_PICTURES)
        n_layers = N_LAYER - (heads is not None)
        loss = loss_of(encoder(as_input(shown), n_layers), shown)
        learn(encoder, rates, learning_rate_at(step, n_steps), loss)
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            took = time.monotonic() - started
            log(f"step {step + 1}/{n_steps} loss {np.mean(losses[-50:]):.4f} {took:.0f} s")


def patch_loss() -> tuple[Loss, nn.Module]:
    """Return the loss of saying what covers each patch, and the background; and its heads."""
    sizes = (len(THINGS) + 1, len(COLOURS) + 1, N_PLACES + 1, len(COLOURS))
    heads = nn.Linear(N_TEXT, sum(sizes))

    def loss_of(rows: Tensor, pictures: list[Picture]) -> Tensor:
        labels = torch.from_numpy(np.stack([labels_of(p) for p in pictures]))
        grounds = torch.tensor([[*COLOURS].index(p.scene.background) for p in pictures])
        labels = torch.cat([labels, grounds[:, None, None].expand(-1, N_ROWS, 1)], 2)
        covered = labels[..., 0] != NO_THING
        loss = torch.zeros(())
        for index, part in enumerate(heads(rows).split(sizes, 2)):
            each = F.cross_entropy(
                part.flatten(0, 1), labels[..., index].flatten(), reduction="none"
            )
            each = each.view(labels.shape[:2])
            if index == 3:
                loss = loss + 0.5 * each.mean()
            else:
                loss = loss + each[covered].mean() + 0.5 * each[~covered].mean()
        return loss

    return loss_of, heads


def captions(pictures: Sequence[Picture]) -> Tensor:
    """Return the tokens of the captions of pictures, int64 (n, 64)."""
    return torch.tensor([list(picture.scene.caption.encode()) for picture in pictures])


def weights_of(pictures: Sequence[Picture]) -> Tensor:
    """Return the weights of the characters of captions: a name counts as much as the rest together."""
    weights = torch.full((len(pictures), N_ROWS), 0.2)
    for row, picture in zip(weights, pictures, strict=True):
        for start, character in enumerate(picture.scene.caption):
            if character != " ":
                row[start] = 1.0
        for index, thing in enumerate(picture.scene.things):
            start = index * (N_COLOUR + N_NAME + N_PLACE) + N_COLOUR
            row[start : start + len(thing.name)] = 8.0 / len(thing.name)
    return weights


def caption_loss(embeddings: Tensor) -> Loss:
    """Return the loss of giving the embeddings of a caption.

    A row must be nearer to the embedding of its character than to that of any other, and near to it at all.
    """
    apart = torch.cdist(embeddings[32:127], embeddings[32:127]).fill_diagonal_(torch.inf)
    near = apart.amin(1).mean()  # distance of a letter to the nearest other one

    def loss_of(rows: Tensor, pictures: list[Picture]) -> Tensor:
        wanted = captions(pictures)
        away = torch.cdist(rows.flatten(0, 1), embeddings) / near
        each = F.cross_entropy(-SHARPNESS * away, wanted.flatten(), reduction="none")
        own = away.gather(1, wanted.flatten()[:, None])[:, 0]
        weight = weights_of(pictures).flatten()
        return ((each + own) * weight).sum() / weight.sum()

    return loss_of


@torch.no_grad()
def measure(encoder: Encoder, embeddings: Tensor, n: int, seed: int) -> tuple[int, float]:
    """Return how many of `n` held-out pictures have a right caption, and the mean distance to it.

    The distance is a part of that between two letters.
    """
    rng, n_right, away = random.Random(seed), 0, list[float]()
    pictures: list[Picture] = []
    while len(pictures) < n:
        picture = make_picture(rng)
        if picture.is_held_out:
            pictures.append(picture)
    near = (
        torch.cdist(embeddings[32:127], embeddings[32:127]).fill_diagonal_(torch.inf).amin(1).mean()
    )
    for start in range(0, n, 100):
        shown = pictures[start : start + 100]
        distances = torch.cdist(encoder(as_input(shown)).flatten(0, 1), embeddings).view(
            len(shown), N_ROWS, -1
        )
        wanted = captions(shown)
        n_right += int((distances.argmin(2) == wanted).all(1).sum())
        away.append(float(distances.gather(2, wanted[..., None]).mean() / near))
    return n_right, float(np.mean(away))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="the text model; the encoder is written beside it")
    parser.add_argument("--resume", type=Path, help="start with this GGUF file of the encoder")
    parser.add_argument("--fonts", nargs="*", default=[], help="font files for digits in pictures")
    parser.add_argument("--seed", type=int, default=20261127)
    parser.add_argument("--stage", type=int, default=0, help="first stage to run, from 0")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    encoder, pictures = Encoder(), Pictures(arguments.seed, arguments.fonts)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(arguments.model).tensors}
    embeddings = torch.from_numpy(tensors["token_embd.weight"].astype(np.float32))

    def log(line: str) -> None:
        print(line, flush=True)

    log(f"{sum(p.numel() for p in encoder.parameters()):,} parameters")
    if arguments.resume:
        load(encoder, arguments.resume)
    if arguments.stage == 0:
        loss, heads = patch_loss()
        train(encoder, loss, pictures, 3500, 1.0, heads, log)
    output = arguments.model.with_name(f"mmproj-{arguments.model.name}")
    blend: dict[str, Tensor] = {}
    for n_steps, peak, share in STAGES:
        train(encoder, caption_loss(embeddings), pictures, n_steps, peak, None, log)
        for name, weight in encoder.state_dict().items():
            blend[name] = blend.get(name, torch.zeros(())) + share * weight
        n_right, away = measure(encoder, embeddings, 1000, 9)
        log(f"{n_right} of 1000 captions are right, distance {away:.3f}")
        export(encoder, output)
    encoder.load_state_dict(blend)  # better than each: errors of the stages differ
    export(encoder, output)
    log(f"{output}: {output.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
