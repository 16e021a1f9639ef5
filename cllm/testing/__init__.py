"""Public helpers for tests: a decoder without libllama, its conformance suite, tick log replay."""

from cllm.testing.conformance import check_decoder
from cllm.testing.fake_decoder import FakeDecoder, FakeVocabulary
from cllm.testing.replay import Difference, Replay, replay

__all__ = ["Difference", "FakeDecoder", "FakeVocabulary", "Replay", "check_decoder", "replay"]
