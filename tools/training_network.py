"""The network of the embedded model in torch, computed as llama.cpp computes it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from tools.tiny_vocabulary import N_VOCAB

N_LAYER, N_EMBD, N_HEAD, N_FF = 4, 128, 4, 384
N_ROT = N_EMBD // N_HEAD
N_CTX_TRAIN = 2048
ROPE_BASE = 10_000.0
RMS_EPS = 1e-5


class Block(nn.Module):
    """Attention and SwiGLU with `n_ff` channels, as llama.cpp's `llama` architecture computes them."""

    def __init__(self, n_ff: int = N_FF) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(N_EMBD, eps=RMS_EPS)
        self.attn_q = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.attn_k = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.attn_v = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.attn_output = nn.Linear(N_EMBD, N_EMBD, bias=False)
        self.ffn_norm = nn.RMSNorm(N_EMBD, eps=RMS_EPS)
        self.ffn_gate = nn.Linear(N_EMBD, n_ff, bias=False)
        self.ffn_up = nn.Linear(N_EMBD, n_ff, bias=False)
        self.ffn_down = nn.Linear(n_ff, N_EMBD, bias=False)

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
