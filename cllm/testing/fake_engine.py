"""FakeEngine: an `Engine` without libllama and without a model, whose answers are scripted.

The event loop's side, the inference thread, the scheduler and the bookkeeping are the real ones.  Only the
model is replaced.  The engine starts in a millisecond, and a test can script its faults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from cllm import Engine, EngineConfig, InvalidArgumentError, SamplingParams
from cllm.engine.chat.media_marks import shown
from cllm.engine.chat.named_formats import DEFAULT_CALLS
from cllm.engine.config import NGRAM, EngineOptions, check_known
from cllm.engine.constraint import Mask
from cllm.engine.core.kv_cache import KVCache
from cllm.engine.core.ngram_drafter import NgramDrafter
from cllm.engine.core.speculation import N_DRAFT_ROWS
from cllm.engine.embedding import EmbeddingInfo
from cllm.engine.media_rows import Spans
from cllm.engine.request import GenerationRequest, ModelInfo
from cllm.engine.sampling.logprobs import LogprobReader
from cllm.engine.sampling.row_scan import RowScan
from cllm.engine.thread.backend import CheckServing, Loaded
from cllm.engine.thread.worker_thread import WorkerThreads
from cllm.testing.fake_decoder import FakeDecoder, Fault, Latency, Poison
from cllm.testing.fake_encoder import SEPARATOR, FakeTextEncoder
from cllm.testing.fake_loras import FakeLoras
from cllm.testing.fake_media import SAMPLE_RATE, FakeMediaEncoder
from cllm.testing.fake_vocabulary import FakeVocabulary


class AskedSampler:
    """Base of samplers without llama.cpp: the engine calls `choose` for every token."""

    constraint = None
    is_greedy = False

    def may_be(self, token: int) -> bool:
        """Raise `AssertionError`: the engine calls this only for greedy samplers."""
        raise AssertionError(f"{token}: asked of those that are greedy")

    def accept(self, token: int) -> None:
        """Do nothing: the sampler has no memory."""

    def recall(self, token: int) -> None:
        """See `TokenSampler`."""
        self.accept(token)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


@dataclass(frozen=True, slots=True)
class FakeAnswer:
    """An answer with reasoning, text and tool calls, in the format of a `FakeEngine`'s own chat template.

    With another `chat_template`, script the text that a model of that template would write.

    Parameters
    ----------
    text, reasoning : str
    tool_calls : sequence
        Each a name and its arguments, a mapping or JSON text: `[("get_weather", {"city": "Oslo"})]`.  Or a
        mapping of `name` and `arguments`.

    Raises
    ------
    InvalidArgumentError
        A call without a name, or with anything but a name and arguments.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[tuple[str, Mapping[str, Any] | str] | Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.tool_calls, list | tuple):
            raise InvalidArgumentError("tool_calls", self.tool_calls, "a list")
        object.__setattr__(self, "tool_calls", tuple(map(_call, self.tool_calls)))

    def written(self) -> str:
        """Return the text that a model would write: reasoning in `<think>` tags, the text, then the calls."""
        thought = f"<think>\n{self.reasoning}\n</think>\n\n" if self.reasoning else ""
        calls = [DEFAULT_CALLS.write(*_call(call)) for call in self.tool_calls]
        return thought + "\n".join([*filter(None, [self.text]), *calls])


def _call(given: Any) -> tuple[str, str]:
    """Return the name of a call and its arguments as text."""
    try:
        if not isinstance(given, Mapping):
            name, arguments = given
        elif set(given) <= {"name", "arguments"}:
            name, arguments = given["name"], given.get("arguments", {})
        else:
            raise KeyError
        if not isinstance(name, str):
            raise TypeError
        return name, arguments if isinstance(arguments, str) else json.dumps(dict(arguments))
    except (KeyError, TypeError, ValueError):
        limit = "a name and its arguments"
        raise InvalidArgumentError("tool_calls", given, limit) from None


Answer = str | FakeAnswer
Answers = Mapping[str, Answer] | Callable[[str], Answer]
FindAnswer = Callable[[GenerationRequest, str], Answer]

N_CTX_TRAIN = 4096
CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ {'name': call.function.name,"
    " 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class FakeEngine(Engine):
    """An engine with scripted answers.

    Streams, queues, cancellation, deadlines, preemption, statistics and `audit` are those of `Engine`.  A
    token is a byte.  Samplers and constraints have no effect: the output is the scripted answer, then the end.
    `max_tokens`, `stop` and `stop_token_ids` end the output as usual.  Log probabilities and scores have the
    right shape and are the same every time, but are derived from a hash of the tokens.

    Parameters
    ----------
    answers : mapping or callable, optional
        Answers by prompt.  A mapping is searched for the whole prompt.  Then it is searched for the key that
        ends last in the prompt (of several, the longest): the last question of a chat.  The key `""` is the
        default.  An answer is a text, or a `FakeAnswer` with reasoning and calls.  A request without an
        answer ends with an error; with `prompt_logprobs`, as in `score`, its answer is empty.  None: every
        answer is its prompt.  An image in a prompt is the text `<image>`, audio is `<audio>`.
    latency_s : float or callable
        Real seconds that a decode takes, or a function that returns them from its `FakeRun`s.  Closing the
        engine ends such a decode.  As with llama.cpp, cancelling requests ends it only if they have at least
        16 of its rows, and more than half of them.
    faults, poison, call_faults :
        Scripted faults by decode, by request and by call; see `FakeDecoder`.
    config : EngineConfig, optional
        All settings as one value, instead of the others.
    **options
        The fields of `EngineConfig`; those of llama.cpp have no effect.  `chat_template` is rendered
        as an engine's; calls that a text makes are found in the format of that template.

    Raises
    ------
    TypeError
        An unknown option, or options beside `config`.
    InvalidArgumentError
        `answers` or an option with a value that cannot be used.

    Attributes
    ----------
    decoder : FakeDecoder
        Decoder of the engine, a new one after `reload`.  Its `faults`, `call_faults`, `poison` and
        `latency_s` may be changed while the engine runs, from any thread.
    encoder : FakeTextEncoder
        Encoder for `embed`, and for `rerank` with `pooling="rank"`; a new one after `reload`.  Texts that
        share words have similar vectors.
    media : FakeMediaEncoder
        Encoder of images and audio, which needs no projector; a new one after `reload`.  It counts them.
    loras : FakeLoras
        Loaded adapters; any path can be loaded as one.  Adapters do not change the scripted answers.

    Notes
    -----
    The inference thread calls `answers`, `poison` and `latency_s`.  Data that they share with a test needs a
    lock.  While one of them blocks, nothing is computed and closing waits.  An exception of `answers` ends
    its request; an exception of the others is a failed decode.

    Examples
    --------
    >>> async with FakeEngine({"1+1=": "2"}) as engine:
    ...     completion = await engine.generate("1+1=")
    """

    _child_backend = None

    def __init__(
        self,
        answers: Answers | None = None,
        *,
        latency_s: Latency = 0.0,
        faults: Mapping[int, Fault] | None = None,
        poison: Poison | None = None,
        call_faults: Mapping[tuple[str, int], bool | Exception] | None = None,
        config: EngineConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        check_known(options, ("latency_s", "faults", "poison", "call_faults"))
        super().__init__(config=config, **options)
        if not (answers is None or callable(answers) or isinstance(answers, Mapping)):
            limit = "a mapping from prompts to answers, a function or None: there is no model"
            raise InvalidArgumentError("answers", answers, limit)
        # Not a method: the inference thread, which calls it, must not keep the engine.
        self._find_answer: FindAnswer = partial(_scripted, _repeat if answers is None else answers)
        self._make_decoder = partial(
            _decoder_of,
            faults=faults,
            poison=poison,
            call_faults=call_faults,
            latency_s=latency_s,
        )
        self.decoder: FakeDecoder = self._make_decoder(self.config)
        self.encoder: FakeTextEncoder = _encoder_of(self.config)
        self.media: FakeMediaEncoder = FakeMediaEncoder()
        self.loras: FakeLoras = FakeLoras()

    def _make_backend(self, config: EngineConfig) -> _FakeBackend:
        if config is not self.config:  # the engine is being reloaded
            self.decoder = self._make_decoder(config)
            self.encoder = _encoder_of(config)
            self.media = FakeMediaEncoder()
            self.loras = FakeLoras()
        parts = self.decoder, self.encoder, self.media, self.loras
        return _FakeBackend(config, *parts, self._find_answer)

    def fail_next_decode(self, fault: Fault) -> None:
        """Make the next decode that begins after this call fail, once.

        Parameters
        ----------
        fault : int, exception or "nan"
            A code of `llama_decode`, an exception to raise, or NaN in the first output row.
        """
        self.decoder.faults[self.decoder.n_decodes + 1] = fault


def _decoder_of(config: EngineConfig, **options: Any) -> FakeDecoder:
    kv_unified, n_seq_ids = config.kv_layout(N_CTX_TRAIN)
    return FakeDecoder(
        n_ctx=max(config.n_cells or N_CTX_TRAIN, n_seq_ids),
        n_seq_max=n_seq_ids,
        n_batch=config.n_batch,
        kv_unified=kv_unified,
        n_outputs_max=n_seq_ids + (N_DRAFT_ROWS if config.reserves_drafts else 0),
        **options,
    )


def _encoder_of(config: EngineConfig) -> FakeTextEncoder:
    return FakeTextEncoder(n_batch=config.n_ubatch, is_classifier=config.pooling == "rank")


class _FakeBackend:
    """A `Backend` over a fake decoder and a fake encoder."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: FakeDecoder,
        encoder: FakeTextEncoder,
        media: FakeMediaEncoder,
        loras: FakeLoras,
        find_answer: FindAnswer,
    ) -> None:
        self._config = config
        self._decoder = decoder
        self._encoder = encoder
        self._media = media
        self._loras = loras
        self._find_answer = find_answer
        self._vocabulary = FakeVocabulary()

    def check_memory(self, loaded: EngineConfig | None) -> None:
        pass

    def check_lora(self, path: Path) -> None:
        pass

    def load(self, owned: ExitStack) -> Loaded:
        decoder, vocabulary = self._decoder, self._vocabulary
        template = self._config.read_chat_template()
        for lora in self._config.loras:
            self._loras.load(lora.name, lora.path, lora.scale)
        return Loaded(
            model=ModelInfo(
                path=vocabulary.path,
                name="fake",
                description="a model that says what it was told to say",
                architecture="fake",
                n_params=0,
                size_bytes=0,
                n_vocab=vocabulary.n_tokens,
                n_ctx_train=N_CTX_TRAIN,
                n_embd=1,
                n_layer=1,
                chat_template=CHAT_TEMPLATE if template is None else template,
                tool_chat_template=None,
                n_ctx=decoder.n_ctx_seq,
                fingerprint="fake",
                state_key="fake",
                embedding=EmbeddingInfo(
                    pooling=self._config.pooling or "mean",
                    n_values=self._encoder.n_values,
                    n_tokens_max=self._encoder.n_batch,
                    between=(SEPARATOR,),
                ),
                loras=self._loras.infos,
                modalities=("text", "image", "audio"),
                audio_sample_rate=SAMPLE_RATE,
            ),
            vocabulary=vocabulary,
            decoder=decoder,
            kv_cache=KVCache(
                n_cells=decoder.n_ctx,
                n_seq_ids=decoder.n_seq_max,
                n_ctx_seq=decoder.n_ctx_seq,
                kv_unified=decoder.kv_unified,
            ),
            make_sampler=self._make_sampler,
            read_logprob=LogprobReader(vocabulary, decoder.n_vocab).read,
            n_prefill_chunk=self._config.n_batch,
            encoder=self._encoder,
            media=self._media,
            loras=self._loras,
            # Not with "auto": the ticks of a test must not depend on the speed of the machine.
            drafter=NgramDrafter() if self._config.speculation == NGRAM else None,
        )

    def _make_sampler(self, request: GenerationRequest) -> _ScriptedSampler:
        if request.deadline == request.submitted_at:  # expired, perhaps before its prompt was read
            return _ScriptedSampler([])
        answer = self._find_answer(request, _text_of(self._vocabulary, request))
        text = answer.written() if isinstance(answer, FakeAnswer) else answer
        return _ScriptedSampler(self._vocabulary.tokenize(text))

    def stop(self) -> None:
        self._decoder.stop()
        self._encoder.stop()

    def constraints(self, check_serving: CheckServing, workers: WorkerThreads) -> _Unconstrained:
        return _Unconstrained()


def _text_of(vocabulary: FakeVocabulary, request: GenerationRequest) -> str:
    """Return the text of a prompt, with `<image>` or `<audio>` in place of each image or recording."""
    text, end, tokens = "", 0, request.prompt_token_ids
    for span, media in zip(Spans.of(tokens), request.media, strict=True):  # each has one chunk
        text += vocabulary.join(tokens[end : span.start]).decode("utf-8", "replace")
        text += shown(media.kind)
        end = span.end
    return text + vocabulary.join(tokens[end:]).decode("utf-8", "replace")


def _scripted(answers: Answers, request: GenerationRequest, prompt: str) -> Answer:
    """Return the answer to a request, which has this text as its prompt."""
    if callable(answers):
        return answers(prompt)
    if (scripted := _answer_of(answers, prompt)) is not None:
        return scripted
    if request.first_scored is not None:  # a request for scores needs no answer
        return ""
    raise LookupError(f"no answer is scripted for {prompt!r}, but for {list(answers)}")


def _repeat(prompt: str) -> str:
    return prompt


def _answer_of(answers: Mapping[str, Answer], prompt: str) -> Answer | None:
    """Return the answer of the prompt, else of the key that ends last in it, else of ""; None without any."""
    if prompt in answers:
        return answers[prompt]
    # The empty text is in every prompt, and ends last in it.
    ends = {key: prompt.rindex(key) + len(key) for key in answers if key and key in prompt}
    if not ends:
        return answers.get("")
    return answers[max(ends, key=lambda key: (ends[key], len(key)))]


class _Unconstrained:
    """Compiler of constraints that compiles none: they have no effect on scripted answers."""

    async def compile(self, params: SamplingParams, tool_grammar: str | None = None) -> None:
        """Do nothing: there is nothing to compile."""

    async def aclose(self) -> None:
        """Do nothing: there is nothing to end."""


class _ScriptedSampler(AskedSampler):
    """Sampler that chooses the tokens of one answer in order, then END.

    It ignores the logits, but leaves a token out that may not come now, because a banned string begins with it.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = (*tokens, FakeVocabulary.END, FakeVocabulary.END)
        self._n_said = 0

    def choose(self, scan: RowScan, allowed: Mask | None = None) -> int:
        while scan.row[self._next] == -math.inf and self._next != FakeVocabulary.END:
            self._n_said += 1
        return self._next

    def accept(self, token: int) -> None:
        # A request that continues the output does not have the token that was left out.
        is_left_out = token != self._next and token == self._tokens[self._n_said + 1]
        self._n_said = min(self._n_said + 1 + is_left_out, len(self._tokens) - 2)

    @property
    def _next(self) -> int:
        return self._tokens[self._n_said]
