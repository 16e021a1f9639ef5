"""Public helpers for tests: engines without a model, loads, a simulator, what must hold after all."""

from cllm.testing.conformance import check_decoder
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
from cllm.testing.schedules import Schedule, ScheduleError, random_schedule
from cllm.testing.simulation import SimulationFailure, SimulationReport, simulate
from cllm.testing.simulator import Simulator
from cllm.testing.steps import (
    Cancel,
    FailCall,
    FailDecode,
    ReadOn,
    ResetPrefixCache,
    Step,
    StopReading,
    Submit,
    Tick,
    Wait,
)

__all__ = [
    "Cancel",
    "FailCall",
    "FailDecode",
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
    "ReadOn",
    "Records",
    "RequestRecord",
    "ResetPrefixCache",
    "Schedule",
    "ScheduleError",
    "SimulationFailure",
    "SimulationReport",
    "Simulator",
    "Step",
    "StopReading",
    "Submit",
    "Tick",
    "Wait",
    "assert_books_agree",
    "assert_isolated",
    "assert_no_drift",
    "assert_reproducible",
    "burst",
    "cancel_storm",
    "check_decoder",
    "oracle",
    "poisson",
    "random_schedule",
    "sequential",
    "simulate",
    "slow_readers",
]
