"""What tests of programs that embed cllm can use, and what a `Decoder` promises."""

from cllm.testing.conformance import check_decoder
from cllm.testing.fake_decoder import FakeDecoder, FakeVocabulary

__all__ = ("FakeDecoder", "FakeVocabulary", "check_decoder")
