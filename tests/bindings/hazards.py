"""All cases of the rows of `hazard_rows` that a caller of the bindings can try."""

from __future__ import annotations

from tests.bindings import (
    hazards_batches,
    hazards_config,
    hazards_embeddings,
    hazards_lifetime,
    hazards_media,
    hazards_memory,
    hazards_sampling,
    hazards_state,
    hazards_vocabulary,
)
from tests.bindings.hazard_case import Case

# In this order: `hazard_rows.BINDINGS_SECTIONS` names the first case of each table.
CASES: list[Case] = [
    *hazards_batches.CASES,
    *hazards_embeddings.CASES,
    *hazards_config.CASES,
    *hazards_memory.CASES,
    *hazards_sampling.CASES,
    *hazards_vocabulary.CASES,
    *hazards_state.CASES,
    *hazards_lifetime.CASES,
    *hazards_media.CASES,
]
