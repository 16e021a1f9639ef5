"""Public helpers for tests: engines without a model, loads of many requests, and assertions about results."""

from __future__ import annotations

from typing import Any

from cllm.removed import moved_to_tests
from cllm.testing.fake_decoder import FakeDecoder, FakeRun, Fault, Latency, Poison
from cllm.testing.fake_engine import FakeAnswer, FakeEngine
from cllm.testing.fake_vocabulary import FakeVocabulary
from cllm.testing.load import Moment, burst, cancel_storm, oracle, poisson, sequential, slow_readers
from cllm.testing.load_summary import LoadSummary
from cllm.testing.records import (
    Oracle,
    PromptKey,
    Records,
    RequestRecord,
    assert_books_agree,
    assert_isolated,
    assert_no_drift,
)
from cllm.testing.reproducibility import assert_reproducible

__all__ = [
    "FakeAnswer",
    "FakeDecoder",
    "FakeEngine",
    "FakeRun",
    "FakeVocabulary",
    "Fault",
    "Latency",
    "LoadSummary",
    "Moment",
    "Oracle",
    "Poison",
    "PromptKey",
    "Records",
    "RequestRecord",
    "assert_books_agree",
    "assert_isolated",
    "assert_no_drift",
    "assert_reproducible",
    "burst",
    "cancel_storm",
    "oracle",
    "poisson",
    "sequential",
    "slow_readers",
]


def __getattr__(name: str) -> Any:
    where = moved_to_tests(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{where}")
