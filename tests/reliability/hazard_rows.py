"""All rows of the hazard tables 1.1 to 1.10, with the cases that test them.

A row is tested by cases of the engine, which name the row, or by cases of the bindings, which are named
here.  Otherwise `unreachable` says why no call of cllm can reach it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.bindings.hazards import CASES as BINDINGS_CASES
from tests.reliability.engine_hazards import CASES as ENGINE_CASES

SECTIONS = {
    "1.1": "llama_decode and batches",
    "1.2": "context and model parameters",
    "1.3": "damaged model files",
    "1.4": "KV cache calls",
    "1.5": "sampling",
    "1.6": "grammars and other constraints",
    "1.7": "vocabulary, tokenizer, templates",
    "1.8": "state blobs",
    "1.9": "LoRA, lifetime, threads",
    "1.10": "images",
}
# The first case of each group of consecutive cases of the bindings for one table.
BINDINGS_SECTIONS = (
    ("1.1", "a run of no tokens"),
    ("1.2", "a context with n_seq_max=0"),
    ("1.3", "a model path that is an empty file"),
    ("1.2", "a model path that is text with NUL"),
    ("1.3", "a model path that is only a magic"),
    ("1.2", "n_gpu_layers -2"),
    ("1.4", "seq_rm of sequence -1"),
    ("1.5", "sampling with an empty chain"),
    ("1.7", "token_to_piece of token -1"),
    ("1.8", "an empty state"),
    ("1.9", "a missing LoRA"),
    ("1.10", "rows that attend to each other over n_ubatch"),
)


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes
    ----------
    name : str
        Table and a few words; cases of the engine use this name.
    bindings : tuple of str
        Claims of the cases of the bindings for this row.
    unreachable : str
        Reason why no call can reach it, or what prevents it; "" if cases test it.
    """

    name: str
    bindings: tuple[str, ...] = ()
    unreachable: str = ""

    @property
    def section(self) -> str:
        """Number of its table: "1.5"."""
        return self.name.split()[0]

    @property
    def n_engine_cases(self) -> int:
        """Number of cases of the engine for this row."""
        return sum(case.row == self.name for case in ENGINE_CASES)

    @property
    def is_met(self) -> bool:
        """True if a case tests the row."""
        return bool(self.bindings or self.n_engine_cases)


def _row(name: str, *bindings: str, unreachable: str = "") -> Row:
    return Row(name, bindings, unreachable)


ROWS = (
    _row("1.1 n_tokens 0 or less", "a run of no tokens", "a batch of no rows"),
    _row("1.1 n_tokens over n_batch", "rows over n_batch", "a run longer than the batch"),
    _row("1.1 encoders", "a context of tiny-encoder", "a context of tiny-t5-encoder"),
    _row("1.1 llama_encode, non-causal batches",
         "more tokens of texts than one piece has, tiny-encoder",
         "more tokens of texts than one piece has, tiny-t5-encoder",
         "a text longer than a model has positions"),
    _row("1.1 decode of a vocab_only model", "a context of a model without weights"),
    _row("1.1 token id out of range", "token -1", "token 260 of 260", "token 2147483647 of 260"),
    _row("1.1 seq_id out of range", "seq_id -1 of a run", "seq_id 4 of n_seq_max 4"),
    _row("1.1 pos NULL with a bad seq_id", "p0 None", "seq_id 256 of a run",
         unreachable="cllm never passes pos NULL"),
    _row("1.1 n_seq_id 0 or negative", "seq_id None of a run",
         unreachable="a row has one seq_id, which the batch writes"),
    _row("1.1 seq_id NULL, counts that lie", "a batch for 0 rows",
         unreachable="the batch owns its arrays and counts its rows"),
    _row("1.1 gap, repeat or step back", "a gap after the last position",
         "a repeat of the last position", "a step back from the last position"),
    _row("1.1 first position not 0", "a first position other than 0"),
    _row("1.1 duplicate positions in a batch", "a duplicate position inside a batch",
         "an overlap inside a batch"),
    _row("1.1 position -1", "p0 -1"),
    _row("1.1 position past the context", "a position past n_ctx_seq", "p0 2147483647",
         "a token for a full sequence"),
    _row("1.1 coupled sequences", unreachable="a row has one seq_id"),
    _row("1.1 outputs over n_outputs_max", "outputs over n_outputs_max",
         "outputs of two sequences over n_outputs_max"),
    _row("1.1 n_batch, n_ctx or n_outputs_max below n_seq_max", "a context with n_batch=3",
         "a context with n_ctx=3", "a context with n_outputs_max=3", "a context with n_batch=0"),
    _row("1.1 bad_alloc inside decode", unreachable="nothing in the process can stop it: the server "
         "runs llama.cpp in a process of its own (tests/engine/test_process.py)"),
    _row("1.1 output buffer cannot grow", unreachable="only with no memory left; the answer to "
         "llama_decode's -2 is in tests/engine/core/test_engine_core_faults.py"),
    _row("1.1 logits of a bad row", "sampling row -1 of 4", "sampling a row without logits"),
    _row("1.1 stale logits", "logits of a decode before the last",
         "logits after a decode without room", "logits after an aborted decode"),
    _row("1.2 n_seq_max", "a context with n_seq_max=257", "a context with n_seq_max=4294967295"),
    _row("1.2 n_ctx too large", "a context with n_ctx=1000000000",
         "a context with n_ctx=4294967295"),
    _row("1.2 n_ctx that is padded"),
    _row("1.2 types of the cache", "a context with type_k='i8'", "a context with type_k=99"),
    _row("1.2 quantized caches that cannot be", "a quantized V cache without flash attention"),
    _row("1.2 unknown enums", "a context with rope_scaling=99", "pooling=99",
         "pooling_type 99 in a file"),
    _row("1.2 n_threads", "a context with n_threads=0", "a context with n_threads_batch=100000"),
    _row("1.2 RoPE of NaN", "a context with rope_freq_base=nan"),
    _row("1.2 other integers", "a context with n_ubatch=0", "n_gpu_layers -2"),
    _row("1.2 model paths", "a model path that is missing", "a model path that is a FIFO"),
    _row("1.3 structural damage", "a model path that is only a magic",
         "a model path that is a header of 2**64-1 tensors"),
    _row("1.3 semantic damage"),
    _row("1.3 weights of NaN"),
    _row("1.3 a mapped file that is truncated", unreachable="the process is gone by then; "
         "`use_mmap=False` reads the file first"),
    _row("1.4 seq_id 256 or more", "seq_rm of sequence 256",
         "seq_pos_max of sequence 256", "seq_add of sequence 256"),
    _row("1.4 n_seq_max <= seq_id < 256", "seq_rm of sequence 4",
         "seq_rm of sequence 4 (per-sequence layout)"),
    _row("1.4 seq_pos of -1", "seq_pos_max of sequence -1", "seq_pos_min of sequence -1"),
    _row("1.4 seq_cp to a seq_id out of range", "seq_cp to sequence 4", "seq_cp to sequence 256"),
    _row("1.4 seq_cp of a part in the per-sequence layout",
         "seq_cp of positions (0, 2) (per-sequence layout)"),
    _row("1.4 seq_cp onto an occupied sequence", "seq_cp onto an occupied sequence",
         "seq_cp onto an occupied sequence (per-sequence layout)"),
    _row("1.4 ranges of seq_rm", "seq_rm of positions (3, 1)", "seq_rm of positions (0, 0)"),
    _row("1.4 seq_add past the end, seq_div", "seq_add of (0, None, 2147483647)",
         unreachable="of seq_div: cllm does not declare it"),
    _row("1.4 part of a recurrent sequence", unreachable="the answer of seq_rm is checked: "
         "tests/engine/llama/test_other_models.py runs recurrent and hybrid models"),
    _row("1.5 sampling a row that is no output", "sampling a row without logits",
         "sampling before the first decode"),
    _row("1.5 chain without a selecting sampler", "sampling with an empty chain",
         "sampling a chain that selects nothing"),
    _row("1.5 apply on an empty array", "no candidates"),
    _row("1.5 NULL samplers", unreachable="a sampler that was not made is an error, and no handle"),
    _row("1.5 freed twice, owned by a chain", "apply of a closed chain",
         unreachable="a chain makes its samplers itself and hands out none"),
    _row("1.5 the same sampler twice", "a second sampler that selects"),
    _row("1.5 windows of INT_MAX tokens", "add_penalties('last_n': 2147483647})"),
    _row("1.5 NaN or infinite parameters", "add_temp(temperature=nan)",
         "add_temp('temperature': 1e-40})"),
    _row("1.5 numbers out of range", "add_top_p('p': 1.5})"),
    _row("1.5 integers out of range", "add_top_k(k=-2)"),
    _row("1.5 legal extremes are finite"),
    _row("1.5 logits all NaN or -inf", "sampling a row that is nan", "sampling a row that is -inf"),
    _row("1.5 logit_bias out of range", "add_logit_bias('biases': {-1: 1.0}})"),
    _row("1.5 accept out of range", "a chain's accept of token -1", "a chain's accept of token 260"),
    _row("1.5 clone of a sampler with a context", unreachable="cllm makes no samplers of its own in C"),
    _row("1.5 stop lists"),
    _row("1.5 sequence breakers and names of samplers"),
    _row("1.6 accept of a token that does not match"),
    _row("1.6 accept of EOG before the end"),
    _row("1.6 samplers before the grammar"),
    _row("1.6 dead ends"),
    _row("1.6 grammar_root or vocab NULL", unreachable="cllm makes no grammar sampler of llama.cpp"),
    _row("1.6 lazy trigger patterns", unreachable="cllm declares no lazy grammars"),
    _row("1.6 max < min in a repetition"),
    _row("1.6 deep brackets and long chains of rules"),
    _row("1.6 exponential ways to the first character"),
    _row("1.6 optional parts by the hundred"),
    _row("1.6 grammars that llama.cpp cannot read"),
    _row("1.6 left recursion"),
    _row("1.6 repetitions"),
    _row("1.6 token references out of range"),
    _row("1.6 schemas that cost too much or are none"),
    _row("1.6 regular expressions"),
    _row("1.7 pieces of token ids out of range", "token_to_piece of token -1",
         "detokenizing token 260", "score of token 1000000000"),
    _row("1.7 is_control out of range", unreachable="cllm asks for all attributes of a token"),
    _row("1.7 lengths of texts and buffers that lie", "tokenizing None",
         unreachable="lengths are those of the bytes, buffers are cllm's own"),
    _row("1.7 text that is none", "tokenizing None", "tokenizing 5"),
    _row("1.7 embedded NUL", "a template name with NUL"),
    _row("1.7 lone surrogates and bytes that are not UTF-8", "tokenizing 'a\\ud800b'",
         "tokenizing b'\\xf4\\x90\\x80\\x80'"),
    _row("1.7 long runs of one character class"),
    _row("1.7 long texts", "a text of more than 1 MiB"),
    _row("1.7 chat templates"),
    _row("1.7 control tokens in a caller's text"),
    _row("1.7 templates that run code or do not end", unreachable="a template is the model's own; "
         "what one may do is in tests/engine/chat/test_template_child.py"),
    _row("1.8 destination out of range", "a state into sequence 4",
         "a state into sequence -1 (per-sequence layout)"),
    _row("1.8 truncated blobs", "a state cut at 16 bytes", "a state cut at -1 bytes",
         "a state cut at 100 bytes (per-sequence layout)"),
    _row("1.8 blobs of garbage", "a state of ones", "a state of 4 positions said to have 5"),
    _row("1.8 an occupied destination", "a state into an occupied sequence"),
    _row("1.8 state files", unreachable="cllm declares no llama_state_*_file"),
    _row("1.8 NaN that stays in the cache", unreachable="a row of NaN ends its request, and makes "
         "a new context without flash attention (tests/engine/core/test_engine_core_faults.py)"),
    _row("1.9 LoRA files and scales", "a missing LoRA", "a LoRA file of garbage",
         "a model file as LoRA", "a LoRA scale of nan"),
    _row("1.9 LoRA NULL, or of another model", "a LoRA of another model", "a LoRA that is closed",
         "closing a LoRA that is applied"),
    _row("1.9 freed before what it is of", "closing a model with an open context",
         "closing a model with an open chain"),
    _row("1.9 use after free", "decode of a closed context", "tokenize of a closed model"),
    _row("1.9 freed twice", "decode of a closed context", "apply of a closed chain"),
    _row("1.9 from another thread", "decode from another thread", "seq_pos_max from another thread"),
    _row("1.9 freed while a decode runs", "closing a context from another thread"),
    _row("1.9 a forked child", "decode in a forked child", "closing a context in a forked child"),
    _row("1.10 a non-causal image over n_ubatch", "rows that attend to each other over n_ubatch"),
    _row("1.10 token and embd in one batch", unreachable="a batch has tokens or embeddings"),
    _row("1.10 rows out of range", "rows of an image over n_batch",
         "rows of an image of another width", "an image past the context",
         "an image that leaves a gap"),
    _row("1.10 files that are no projector of the model", "a projector of another model",
         "a model as projector", "a projector that is garbage", "a projector as model"),
    _row("1.10 token -1 around an image", "a vocabulary without the tokens around a tile"),
    _row("1.10 sizes of images", "pixels of shape (0, 8, 3)", "an image of 2**31 pixels a side",
         "an image of more than 64 Mi pixels", "an image that is all width"),
    _row("1.10 files of images"),
    _row("1.10 files of audio"),
    _row("1.10 images where none can be"),
    _row("1.10 sizes of recordings", "a recording of 1 samples", "a recording of one sample"),
    _row("1.10 media of another kind", "a recording for a projector of images",
         "an image for a projector of audio"),
    _row("1.10 chunks without pixels", "an encode without pixels"),
    _row("1.10 freed before what it is of", "an encode of a closed chunk",
         "closing a projector with an open chunk"),
    _row("1.10 numbers out of range", "a projector with n_threads=0",
         "a projector with image_max_tokens=0"),
)  # fmt: skip


def bindings_sections() -> Iterator[str]:
    """Yield the table of each case of the bindings, in the order of the cases."""
    starts = {claim: section for section, claim in BINDINGS_SECTIONS}
    section = ""
    for case in BINDINGS_CASES:
        section = starts.get(case.claim, section)
        yield section


def faults() -> list[str]:
    """Return the faults of the rows: a row without a case or reason, a name that does not exist or repeats."""
    claims = {case.claim for case in BINDINGS_CASES}
    names = Counter(row.name for row in ROWS)
    found = [f"{name} is there {n} times" for name, n in names.items() if n > 1]
    found += [
        f"{row.name}: there is no case {claim!r} of the bindings"
        for row in ROWS
        for claim in row.bindings
        if claim not in claims
    ]
    found += _unknown("a case of the engine is of the row", (c.row for c in ENGINE_CASES), names)
    found += _unknown("a row is of the table", (row.section for row in ROWS), SECTIONS)
    found += _unknown("a stretch begins with", (claim for _, claim in BINDINGS_SECTIONS), claims)
    for row in ROWS:
        if not (row.is_met or row.unreachable):
            found.append(f"{row.name} is met by no case")
    return found


def _unknown(what: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    return [f"{what} {name!r}, which is not there" for name in sorted(set(names) - set(known))]
