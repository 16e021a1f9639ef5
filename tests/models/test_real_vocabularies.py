"""Real vocabularies: llama.cpp's own cases, text to tokens and back, and text as it is streamed."""

from __future__ import annotations

import codecs
import contextlib
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import pytest

from cllm.bindings import Model, Vocabulary
from cllm.bindings._llama_h import TokenAttr, VocabType
from cllm.engine.constraints.compiler import ConstraintCompiler
from cllm.engine.core.detokenizer import Detokenizer
from cllm.engine.loop.dispatcher import Dispatcher
from cllm.engine.loop.input_processor import InputProcessor
from cllm.engine.loop.loras import LoraRegistry
from cllm.engine.loop.media_reader import MediaReader
from cllm.engine.loop.prompt_tokenizer import PromptTokenizer
from cllm.engine.loop.queue_gate import QueueGate
from cllm.engine.loop.request_call import RequestCall
from cllm.engine.request import GenerationRequest
from cllm.engine.sampling_params import SamplingParams
from cllm.engine.thread.worker_thread import WorkerThreads

pytestmark = pytest.mark.full

# Those that llama.cpp has cases for, and the others.
WITH_CASES = (
    "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2",
    "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip
WITHOUT_CASES = ("aquila", "baichuan", "gpt-neox", "nomic-bert-moe")
NAMES = (*WITH_CASES, *WITHOUT_CASES)

# What their tokens cannot say.  BERT's and T5's kinds normalize a text before they cut it.
WITHOUT_EVERY_BYTE = {"falcon", "refact", "starcoder"}
SPELLING_SPACES = {"baichuan", "gemma-4", "llama-spm", "phi-3"}  # "▁" stands for a space
NORMALIZING = {"bert-bge", "nomic-bert-moe"}
LOSSY = WITHOUT_EVERY_BYTE | SPELLING_SPACES | NORMALIZING
PREFIXING = {"baichuan", "bert-bge", "llama-spm", "nomic-bert-moe", "phi-3"}
# Where llama_detokenize takes no space away but the one that the tokenizer put there.
NOT_CLEANED_UP = {
    "baichuan", "command-r", "deepseek-coder", "deepseek-llm", "llama-spm", "phi-3", "qwen2",
    "qwen35",
}  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
SEPARATOR = "\n__ggml_vocab_test__\n"


def file_of(source: Path, name: str) -> Path:
    return source / "models" / f"ggml-vocab-{name}.gguf"


@cache
def inputs(source: Path, name: str) -> list[str]:
    """The texts of llama.cpp's cases, each before a separator but the last."""
    texts = file_of(source, name).with_suffix(".gguf.inp").read_bytes().decode().split(SEPARATOR)
    return texts if texts[-1] else texts[:-1]


@cache
def texts(source: Path) -> list[str]:
    """The longest list of cases, and characters that are rare in any."""
    rng = random.Random(5)
    rare = [chr(code) for code in (*range(0x20), *range(0x7F, 0xC0), 0xFEFF, 0x2028, 0xFFFD)]
    rare += [chr(rng.randrange(0x300, 0xD800)) for _ in range(100)]
    rare += [chr(rng.randrange(0xE000, 0x110000)) for _ in range(100)]
    mixed = ["".join(rng.choices([*rare, *"ab .▁,'\n" * 5], k=8)) for _ in range(100)]
    return [*inputs(source, "qwen35"), *rare, "▁", "a▁b", "▁ ▁", " '", " . 's ", *mixed]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def vocab(name: str, llama_cpp_source: Path) -> Iterator[Vocabulary]:
    """Each is loaded once."""
    with Model(file_of(llama_cpp_source, name), vocab_only=True) as model:
        yield model.vocab


only_with_cases = pytest.mark.parametrize("name", WITH_CASES, indirect=True)


# --- Tokens -------------------------------------------------------------------------------------
def test_no_vocabulary_of_llama_cpp_is_left_out(llama_cpp_source: Path) -> None:
    models = sorted((llama_cpp_source / "models").glob("ggml-vocab-*.gguf"))
    assert models == sorted(file_of(llama_cpp_source, name) for name in NAMES)
    tested = {path for path in models if path.with_suffix(".gguf.inp").exists()}
    assert tested == {file_of(llama_cpp_source, name) for name in WITH_CASES}


@only_with_cases
def test_the_tokens_of_every_case_are_llama_cpps(
    name: str, vocab: Vocabulary, llama_cpp_source: Path
) -> None:
    outputs = file_of(llama_cpp_source, name).with_suffix(".gguf.out").read_text().splitlines()
    for text, output in zip(inputs(llama_cpp_source, name), outputs, strict=True):
        tokens = [int(token) for token in output.split()]
        assert vocab.tokenize(text, add_special=False) == tokens, text


# --- Text to tokens and back --------------------------------------------------------------------
def kept(text: str, vocab: Vocabulary, name: str) -> bytes:
    """What is left of a text in tokens of this vocabulary, one that does not normalize."""
    if name in SPELLING_SPACES:
        return text.replace("▁", " ").encode()
    if name in WITHOUT_EVERY_BYTE:
        return bytes(byte for byte in text.encode() if byte in byte_tokens(vocab))
    return text.encode()


@cache
def byte_tokens(vocab: Vocabulary) -> set[int]:
    """The bytes that have a token of their own."""
    pieces = map(vocab.piece, range(vocab.n_tokens))
    return {piece[0] for piece in pieces if len(piece) == 1}


def test_a_vocabulary_that_puts_a_space_before_a_text_is_known(
    name: str, vocab: Vocabulary
) -> None:
    assert vocab.prefixes_space == (name in PREFIXING)


def test_a_text_comes_back_byte_for_byte_but_for_what_no_token_can_say(
    name: str, vocab: Vocabulary, llama_cpp_source: Path
) -> None:
    n_changed = 0
    for text in texts(llama_cpp_source):
        plain = vocab.tokenize(text, add_special=False)
        joined = vocab.join(plain)
        assert vocab.join(vocab.tokenize(text)) == joined, "control tokens have no text"
        if name in NORMALIZING:
            # Not the text, but one that is cut into the same tokens, unless some were unknown.
            again = vocab.tokenize(joined.decode(), add_special=False)
            assert again == plain or not all(map(vocab.piece, plain))
        else:
            assert joined == kept(text, vocab, name)
        n_changed += joined != text.encode()
    assert bool(n_changed) == (name in LOSSY)


def test_a_text_that_spells_a_control_token_is_text_unless_asked_for(
    name: str, vocab: Vocabulary
) -> None:
    control = [
        token
        for pool in pools(vocab)[1:]
        for token in pool
        if vocab.attributes(token) & TokenAttr.CONTROL
    ]
    assert control
    for token in control:
        spelled = vocab.spelling(token).decode()
        tokens = vocab.tokenize(f"a{spelled}b", add_special=False)
        assert not any(vocab.attributes(token) & TokenAttr.CONTROL for token in tokens)
        if name not in NORMALIZING:
            assert vocab.join(tokens).decode() == f"a{spelled}b"
        assert vocab.tokenize(spelled, add_special=False, parse_special=True) == [token]


@pytest.mark.sampled(3)
def test_what_is_read_of_all_tokens_at_once_is_what_each_token_has(vocab: Vocabulary) -> None:
    tokens = range(vocab.n_tokens)
    assert vocab.pieces(special=True) == [vocab.token_to_piece(t, special=True) for t in tokens]
    assert vocab.pieces() == [vocab.token_to_piece(token) for token in tokens]
    assert vocab.ends == tuple(filter(vocab.is_eog, tokens))


def test_the_text_is_llama_cpps_but_for_the_spaces_that_it_takes_away(
    name: str, vocab: Vocabulary, llama_cpp_source: Path
) -> None:
    rng = random.Random(11)
    samples = [vocab.tokenize(text, add_special=False) for text in texts(llama_cpp_source)]
    samples += [random_tokens(rng, vocab) for _ in range(200)]
    for tokens in samples:
        # llama.cpp takes the first space from the first token only, though it have no text.
        while tokens and not vocab.piece(tokens[0]):
            tokens = tokens[1:]
        joined, whole = vocab.join(tokens), vocab.detokenize(tokens)
        if name in NOT_CLEANED_UP:
            assert joined == whole
        else:
            assert joined.replace(b" ", b"") == whole.replace(b" ", b"")


@pytest.mark.parametrize("name", ["baichuan", "llama-spm", "phi-3"], indirect=True)
def test_after_a_begin_token_llama_cpp_leaves_the_space_that_join_takes_away(
    vocab: Vocabulary,
) -> None:
    tokens = vocab.tokenize("some text")
    assert tokens[0] == vocab.bos
    assert vocab.detokenize(tokens, remove_special=True) == b" some text"
    assert vocab.join(tokens) == b"some text"


# --- Text as it is streamed ---------------------------------------------------------------------
def streamed(pieces: Sequence[bytes], stop: Sequence[str] = (), *, strips_space: bool) -> str:
    detokenizer = Detokenizer(stop, strips_space=strips_space)
    return "".join([*map(detokenizer.push, pieces), detokenizer.flush()])


def begins_text(vocab: Vocabulary, prompt: Sequence[int]) -> bool:
    """Whether an output after these tokens starts with the space that the tokenizer puts there."""
    return vocab.prefixes_space and not any(map(vocab.piece, prompt))


def pools(vocab: Vocabulary) -> list[Sequence[int]]:
    """Any tokens, and where bytes and control tokens are: those with a part, the first, the last."""
    n, few = vocab.n_tokens, 600
    named = [token for token in (vocab.bos, vocab.eos, vocab.eot, vocab.pad) if token is not None]
    return [range(n), named, range(few), range(n - few, n)]


def random_tokens(rng: random.Random, vocab: Vocabulary) -> list[int]:
    """Up to 60 of any tokens."""
    return [rng.choice(rng.choice(pools(vocab))) for _ in range(rng.randint(0, 60))]


def groups(rng: random.Random, pieces: Sequence[bytes]) -> list[bytes]:
    """The same bytes in fewer pieces."""
    ends = sorted(rng.choices(range(len(pieces) + 1), k=8))
    return [b"".join(pieces[i:j]) for i, j in pairwise([0, *ends, len(pieces)])]


@pytest.mark.parametrize("add_special", [False, True])
def test_prompt_and_stream_are_the_text_of_the_whole_wherever_it_is_cut(
    vocab: Vocabulary, llama_cpp_source: Path, add_special: bool
) -> None:
    rng = random.Random(7)
    n_inside = 0
    for text in texts(llama_cpp_source):
        tokens = vocab.tokenize(text, add_special=add_special)
        pieces, whole = list(map(vocab.piece, tokens)), vocab.join(tokens)
        n = len(tokens)
        for cut in range(n + 1) if n <= 24 else rng.sample(range(n + 1), 16):
            prompt = vocab.join(tokens[:cut])
            output = streamed(pieces[cut:], strips_space=begins_text(vocab, tokens[:cut]))
            assert whole.startswith(prompt)
            assert output == whole[len(prompt) :].decode(errors="replace")
            is_inside = prompt != prompt.decode(errors="ignore").encode()
            if not is_inside and is_valid(whole):
                assert prompt.decode() + output == whole.decode()
            n_inside += is_inside
    # Every vocabulary but those of whole words cuts some character into tokens.
    assert bool(n_inside) == (vocab.kind in (VocabType.BPE, VocabType.SPM))


def is_valid(data: bytes) -> bool:
    return data == data.decode(errors="ignore").encode()


def test_any_tokens_are_streamed_as_one_decode_of_their_bytes(vocab: Vocabulary) -> None:
    rng = random.Random(3)
    n_invalid = n_empty = 0
    for _ in range(200):
        tokens = random_tokens(rng, vocab)
        pieces = list(map(vocab.piece, tokens))
        whole = b"".join(pieces)
        for cuts in (pieces, groups(rng, pieces), [bytes([byte]) for byte in whole]):
            assert streamed(cuts, strips_space=False) == whole.decode(errors="replace")
        joined = vocab.join(tokens).decode(errors="replace")
        assert streamed(pieces, strips_space=begins_text(vocab, [])) == joined
        n_invalid += not is_valid(whole)
        n_empty += not all(pieces)
    assert n_empty, "control tokens were among them"
    assert bool(n_invalid) == (vocab.kind in (VocabType.BPE, VocabType.SPM)), "and bytes"


@pytest.mark.parametrize("name", ["llama-spm", "qwen2"], indirect=True)
def test_what_is_held_back_is_never_longer_than_the_longest_stop_string(vocab: Vocabulary) -> None:
    rng = random.Random(9)
    pieces = [vocab.piece(rng.randrange(vocab.n_tokens)) for _ in range(20_000)]
    text, never = b"".join(pieces).decode(errors="replace"), "\U0010ffff"
    assert never not in text
    # All of it but the last character is in the text, somewhere.
    lengths = [1 + n % 40 for n in range(64)]
    starts = [rng.randrange(len(text) - 40) for _ in lengths]
    stop = [text[i : i + n - 1] + never for i, n in zip(starts, lengths, strict=True)]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    detokenizer = Detokenizer(stop)
    n_seen, n_streamed, n_held = 0, 0, []
    for piece in pieces:
        n_seen += len(decoder.decode(piece))
        n_streamed += len(detokenizer.push(piece))
        n_held.append(n_seen - n_streamed)
        values = [v for v in vars(detokenizer).values() if isinstance(v, str | bytes | list)]
        assert max(map(len, values)) < 40, "all that it can grow by"
    assert 20 < max(n_held) < 40, "the stop strings were nearly there"
    assert n_streamed + len(detokenizer.flush()) == len(text)


# --- The way in ---------------------------------------------------------------------------------
async def opened(vocab: object, prompt: str | tuple[int, ...], gate: QueueGate) -> list[bool]:
    """`strips_space` of the request that input_processor makes of a prompt."""
    found: list[bool] = []

    def channel(call: RequestCall, request: GenerationRequest, *_: object, **__: object) -> None:
        found.append(request.strips_space)

    model = SimpleNamespace(n_ctx_train=10**6, n_ctx=64, fingerprint="fp", generates=True, loras=())
    dispatcher = SimpleNamespace(
        model=model,
        loaded=lambda: model,
        channel=channel,
        is_open=lambda request_id: False,
        next_serial=lambda: 1,
        submit=lambda channel: None,
    )
    workers = WorkerThreads()
    input_processor = InputProcessor(
        lambda **_: cast(Vocabulary, vocab),
        gate,
        cast(Dispatcher, dispatcher),
        LoraRegistry(cast(Dispatcher, dispatcher), workers, lambda path: None, is_fixed=True),
        PromptTokenizer(
            lambda: cast(Vocabulary, vocab),
            cast(Any, lambda: model),
            workers,
            workers.start("cllm-tokenizer"),
            MediaReader(cast(Any, None), cast(Any, None), cast(Any, None)),
        ),
        stream_buffer=64,
        constraints=ConstraintCompiler(
            lambda: cast(Vocabulary, vocab), workers, n_threads=1, files=tuple
        ),
        can_speculate=False,
    )
    try:
        await input_processor.open(RequestCall(prompt, SamplingParams(), 0, None, "r"))
    finally:
        await input_processor.aclose()
        workers.end()
    return found


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["llama-spm", "gemma-4"], indirect=True)
async def test_an_output_gives_its_first_space_away_only_where_it_begins_the_text(
    vocab: Vocabulary,
) -> None:
    begin, word = vocab.tokenize("a")
    gate = QueueGate(n_seq_max=9, max_queue=0)
    for prompt in ("", (begin,), (begin, begin), "a", " ", (word,), (begin, word)):
        tokens = vocab.tokenize(prompt) if isinstance(prompt, str) else prompt
        assert await opened(vocab, prompt, gate) == [begins_text(vocab, tokens)]


@pytest.mark.anyio
async def test_a_request_that_a_vocabulary_fails_gives_its_place_back() -> None:
    gate, broken = QueueGate(n_seq_max=1, max_queue=0), SimpleNamespace(n_tokens=9)
    with pytest.raises(AttributeError, match="prefixes_space"):
        await opened(broken, (1,), gate)
    assert gate.n_open == 0


# --- Vocabularies that lack what others have ----------------------------------------------------
def write(path: Path, tokens: list[str]) -> Path:
    """A vocabulary of these tokens, the first of which ends a text, or of none."""
    with contextlib.closing(gguf.GGUFWriter(path, "llama")) as writer:
        if tokens:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_list(tokens)
            writer.add_token_merges([" ".join(tokens[:2])])
            writer.add_eos_token_id(0)
        else:
            writer.add_tokenizer_model("no_vocab")
            writer.add_vocab_size(8)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    return path


def test_a_vocabulary_needs_no_letter_in_particular(tmp_path: Path) -> None:
    with Model(write(tmp_path / "x.gguf", ["<end>", "A", "B"]), vocab_only=True) as model:
        assert not model.vocab.prefixes_space
        assert model.vocab.join(model.vocab.tokenize("AB")) == b"AB"


@pytest.mark.parametrize(
    "call",
    [
        "tokenize('a')",
        "prefixes_space",
        "piece(1)",
        "pieces()",
        "ends",
        "is_eog(1)",
        "control_names()",
    ],
)
def test_a_model_without_a_vocabulary_refuses_instead_of_aborting(
    tmp_path: Path, call: str
) -> None:
    path = write(tmp_path / "x.gguf", [])
    program = f"""
        from cllm.bindings import Model
        from cllm.errors import CllmError
        try:
            Model({str(path)!r}, vocab_only=True).vocab.{call}
        except CllmError as error:
            print("refused:", error)
    """
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith("refused: ")
