"""Faults of llama.cpp b11549 with some architectures, as `make test-archs` finds them.

Another version may be right: `tools.bump` runs the same tests.
"""

from __future__ import annotations

from cllm.bindings import Model
from cllm.errors import ModelLoadError

# Reasons for which no model of an architecture is loaded.
REJECTED = {
    "cogvlm": "llama.cpp takes logits from the wrong row of a batch",
    "plamo2": "llama.cpp ends the process where several sequences are computed together",
}
# Copies of their states are made at the next decode, and are empty if the source was emptied before:
# `llama_dsv4_comp_state` in llama-kv-cache-dsv4.cpp.
LATE_COPIES = ("deepseek4",)
# A row now and then differs in its last digits, though all shapes of the trial at load agree: pooled keys,
# lightning attention, sparse attention.
UNSTEADY = ("glm5-next", "minimax-01", "minimax-m3")


def architecture_of(model: Model) -> str | None:
    """Return the name of a model's architecture, as its file has it."""
    return model.metadata_value("general.architecture")


def check_architecture(model: Model) -> None:
    """Return if llama.cpp computes models of this architecture.

    Raises
    ------
    ModelLoadError
        Names the architecture and the fault.
    """
    architecture = architecture_of(model)
    if architecture in REJECTED:
        raise ModelLoadError(model.path, f"{architecture}: {REJECTED[architecture]}")


def can_copy(model: Model) -> bool:
    """Return True if sequences of the model can be copied."""
    return architecture_of(model) not in LATE_COPIES
