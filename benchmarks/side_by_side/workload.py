"""The workload of every peer: models, prompts that share no prefix, settings."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from benchmarks.measure import TEXT_TOKENS
from cllm.engine import config
from tools import make_model, real_encoder, real_model

REAL_MODEL = "SmolLM2-135M-Instruct/Q4_1"
EMBEDDING_MODEL = "all-MiniLM-L6-v2/F16"
EMBEDDED_MODEL = "cllm-tiny/F16"


@dataclass(frozen=True)
class Setup:
    """Settings that all peers get alike."""

    model: Path
    n_threads: int
    n_ctx: int
    n_seq_max: int
    n_batch: int = 512
    n_ubatch: int = 512
    embeds: bool = False  # True: the servers compute embeddings

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> Setup:
        """Return the settings that another process has written as JSON."""
        return cls(**{**values, "model": Path(values["model"])})

    @property
    def context_options(self) -> dict[str, Any]:
        """Return the settings by llama.cpp's names, with the model; all decodes have the same threads."""
        options = dataclasses.asdict(self) | {"n_threads_batch": self.n_threads}
        del options["embeds"]
        return options

    @property
    def engine_options(self) -> dict[str, Any]:
        """Return the settings as options of `cllm.Engine`."""
        # The others guess no tokens either.
        return self.context_options | {"speculation": None}


def model_path(name: str) -> Path:
    """Return the path of a model by name and file type, such as `qwen3-0.6b/Q4_K_M`; fetch or make it first."""
    if name == REAL_MODEL:
        return real_model.fetch()
    if name == EMBEDDED_MODEL:
        return config.EMBEDDED_MODEL
    model, file_type = name.split("/")
    if name == EMBEDDING_MODEL:
        return real_encoder.fetch(file_type)
    return make_model.ensure(model, cast(make_model.FileType, file_type))


def clients(n: int) -> str:
    """Return the case name of `n` clients."""
    return f"{n} client{'s' * (n > 1)}"


def prompt_of(seed: str, n_tokens: int) -> list[int]:
    """Return random token ids, which depend only on the seed."""
    return random.Random(seed).choices(TEXT_TOKENS, k=n_tokens)


def cells_for(n_sequences: int, n_tokens: int) -> int:
    """Return the KV cells for sequences of `n_tokens` each, rounded up to a multiple of 256 as by llama.cpp."""
    return -(-n_sequences * n_tokens // 256) * 256


@dataclass(frozen=True)
class ClosedLoopSizes:
    """Number of clients that send one request after another.

    Attributes
    ----------
    n_each : int
        Requests of one client.
    """

    n_clients: int
    n_each: int

    @property
    def case(self) -> str:
        """Return the case name, identical for all peers."""
        return clients(self.n_clients)

    @property
    def n_seq_max(self) -> int:
        """Number of sequences with which no client waits."""
        return self.n_clients
