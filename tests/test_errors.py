"""Errors and values of the API can be pickled and copied: they cross the border of a pool of processes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from typing import Any

import pytest

from cllm import errors
from cllm.engine.core.statistics import EngineStatistics
from cllm.engine.sampling_params import SamplingParams

GIVEN: dict[str, tuple[Any, ...]] = {
    "ModelLoadError": ("/a.gguf", "damaged"),
    "ModelChangedError": ("/a.gguf", "changed"),
    "DownloadError": ("hf:a/b", "no network"),
    "RpcServerError": ("127.0.0.1:1", "gone"),
    "LlamaCallError": ("llama_decode", -3),
    "NoKVSlotError": ("llama_decode", 1),
    "InvalidBatchError": ("llama_decode", -1),
    "DecodeFailedError": ("llama_decode", 2, "aborted"),
    "_FieldError": ("n", 5, "1 to 4"),
    "InvalidArgumentError": ("n", 5, "1 to 4"),
    "InvalidRequestError": ("n", None, "1 to 4"),
    "TooMuchTextError": ("prompt", "a", "less"),
    "PositionError": (1, 2, 4),
    "PromptTooLongError": (9, 8),
    "QueueFullError": (3, 1.5),
}


def kinds(kind: type[Any]) -> dict[str, type[Any]]:
    """Return an error of `cllm.errors` and all below it."""
    found: dict[str, type[Any]] = {kind.__name__: kind}
    for below in kind.__subclasses__():
        found |= kinds(below)
    return {name: each for name, each in found.items() if each.__module__ == errors.__name__}


KINDS = kinds(errors.CllmError)


@pytest.mark.parametrize("kind", [KINDS[name] for name in sorted(KINDS)])
def test_an_error_is_the_same_in_another_process(kind: type[Any]) -> None:
    error = kind(*GIVEN.get(kind.__name__, ("it failed",)))
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (str(again), again.args) == (str(error), error.args)
        assert vars(again) == vars(error)


def test_a_copied_error_has_the_text_of_a_value_that_cannot_be_copied() -> None:
    error = errors.InvalidRequestError("prompts", threading.Lock(), "a sequence")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.value.startswith("<unlocked _thread.lock object")


def test_a_missing_extra_keeps_the_name_of_the_library() -> None:
    again = pickle.loads(pickle.dumps(errors.MissingExtraError("not installed", name="httpx")))
    assert (again.name, str(again)) == ("httpx", "not installed")


@pytest.mark.parametrize(
    "value", [SamplingParams(), SamplingParams(logit_bias={3: float("-inf")}), EngineStatistics()]
)
def test_values_with_read_only_mappings_can_be_copied(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
    assert copy.deepcopy(value) == value
    assert dataclasses.asdict(value)
