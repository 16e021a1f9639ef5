"""Sampling options for tests: each sampler, constraint and way to stop."""

from __future__ import annotations

from typing import Any

from tests.conftest import few_in_fast

PROMPTS = ["repeat: a b c d e f g h", "1+1=", "count: 1 2 3", "x"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "temperature_in_celsius": {"type": "integer"},
        "is_raining": {"type": "boolean"},
    },
    "required": ["temperature_in_celsius", "is_raining"],
    "additionalProperties": False,
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 1},
    "narrow": {"temperature": 0.9, "seed": 2, "top_k": 5, "top_p": 0.8, "min_p": 0.02},
    "typical": {"temperature": 1.1, "seed": 3, "typical_p": 0.7, "top_n_sigma": 2.0},
    "penalties": {"temperature": 0.8, "seed": 4, "repeat_penalty": 1.3, "presence_penalty": 0.4},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 0.7, "repeat_last_n": 8},
    "dry": {"temperature": 0.8, "seed": 5, "dry_multiplier": 0.8, "dry_allowed_length": 1},
    "xtc": {"temperature": 1.0, "seed": 6, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "dynatemp": {"temperature": 0.9, "seed": 7, "dynatemp_range": 0.5},
    "mirostat": {"mirostat": 1, "seed": 8},
    "mirostat 2": {"mirostat": 2, "seed": 9},
    "adaptive": {"adaptive_target": 0.4, "seed": 10},
    "biases": {"temperature": 0.7, "seed": 11, "logit_bias": {5: 2.0, 9: float("-inf")}},
    "bans the first": {"temperature": 0.7, "seed": 17, "logit_bias": {0: float("-inf"), 1: 1.0}},
    "ends late": {"temperature": 1.0, "seed": 12, "min_tokens": 12},
    "stop strings": {"temperature": 1.0, "seed": 13, "stop": ["a", "1", "e"]},
    "schema": {"temperature": 1.0, "seed": 14, "json_schema": SCHEMA},
    "expression": {"temperature": 1.0, "seed": 15, "regex": r"(yes|no) [0-9]{3,9}"},
    "grammar": {"temperature": 1.0, "seed": 16, "grammar": 'root ::= "abc" [0-9]+ "."'},
}
# One case for each kind of state; `make test-full` runs the others, too.
FEW = (
    "dry",
    "bans the first",
    "mirostat 2",
    "adaptive",
    "stop strings",
    "schema",
)
FEW_IN_FAST = few_in_fast(SAMPLINGS, FEW.__contains__)
