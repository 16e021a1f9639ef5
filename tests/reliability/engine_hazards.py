"""All cases of the rows of `hazard_rows` that a caller of the engine can try."""

from __future__ import annotations

from tests.reliability import (
    engine_hazards_config,
    engine_hazards_constraints,
    engine_hazards_images,
    engine_hazards_lifetime,
    engine_hazards_prompts,
    engine_hazards_sampling,
)
from tests.reliability.engine_hazard_case import Case

CASES: list[Case] = [
    *engine_hazards_config.CASES,
    *engine_hazards_constraints.CASES,
    *engine_hazards_images.CASES,
    *engine_hazards_lifetime.CASES,
    *engine_hazards_prompts.CASES,
    *engine_hazards_sampling.CASES,
]
