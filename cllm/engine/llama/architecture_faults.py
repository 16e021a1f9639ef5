"""Faults of llama.cpp b11549 with some architectures, as `make test-archs` finds them.

Another version may compute them correctly: `tools.bump` runs the same tests.
"""

from __future__ import annotations

from cllm.bindings import Model
from cllm.errors import ModelLoadError

# Reasons for which no model of an architecture is loaded.
REJECTED = {
    "cogvlm": "llama.cpp takes logits from the wrong row of a batch",
    "plamo2": "llama.cpp ends the process where several sequences are computed together",
}
# Architectures whose states llama.cpp copies only at the next decode.  A copy is empty if its source was
# emptied before: `llama_dsv4_comp_state` in llama-kv-cache-dsv4.cpp.
LATE_COPIES = ("deepseek4",)
# Architectures with which a row sometimes differs in its last digits, though all shapes of the trial at load
# agree: pooled keys, lightning attention, sparse attention.
UNSTEADY = ("glm5-next", "minimax-01", "minimax-m3")


def architecture_of(model: Model) -> str | None:
    """Return the architecture that a model's file names, such as "llama"; None if it names none."""
    return model.metadata_value("general.architecture")


def check_architecture(model: Model) -> None:
    """Check that llama.cpp computes models of this architecture correctly.

    Raises
    ------
    ModelLoadError
        The architecture is in `REJECTED`; names it and the fault.
    """
    architecture = architecture_of(model)
    if architecture in REJECTED:
        raise ModelLoadError(model.path, f"{architecture}: {REJECTED[architecture]}")


def can_copy(model: Model) -> bool:
    """Return True if sequences of the model can be copied."""
    return architecture_of(model) not in LATE_COPIES
