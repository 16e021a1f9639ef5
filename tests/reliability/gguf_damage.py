"""GGUF files with one thing wrong each: the same ones whenever they are made again.

A tiny model is taken apart, damaged in one of the ways of `KINDS`, and written again.  Structural damage
cuts the file or changes bytes.  Semantic damage makes a well-formed file with impossible values.  In the
lists, values that are known to end a process come first.
"""

from __future__ import annotations

import copy
import hashlib
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import gguf

from tests.reliability.gguf_pieces import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    SCALARS,
    STRING,
    UINT32,
    Gguf,
    Reader,
    text,
    texts,
    texts_of,
)
from tools import make_model
from tools.make_model import FileType

NAN, INF = float("nan"), float("inf")

BASES: tuple[tuple[str, FileType], ...] = (
    ("tiny-llama", "Q4_0"), ("tiny-hybrid", "Q4_0"), ("tiny-qwen3", "Q8_0"), ("tiny-swa", "Q4_0"),
    ("tiny-recurrent", "Q4_0"), ("tiny-llama", "F16"),
)  # fmt: skip


@cache
def base(index: int) -> tuple[bytes, Gguf]:
    """Return the bytes of a sound file, and the same file in pieces."""
    whole = make_model.ensure(*BASES[index]).read_bytes()
    return whole, Reader(whole).read()


class Damage(NamedTuple):
    """One damaged file: what was done to which model, and how it is loaded."""

    kind: str
    what: str
    model: str
    data: bytes
    options: dict[str, Any]


@dataclass
class Patient:
    """A model to damage.  Structural damage changes `whole`, semantic damage changes `file`."""

    whole: bytearray
    file: Gguf
    architecture: bytes
    serial: int  # of its kind
    random: random.Random
    options: dict[str, Any] = field(default_factory=dict)

    def set(self, key: str, kind: int, value: Any) -> str:
        """Set a value of the file; the architecture's name comes before a key that begins with a dot."""
        name = (self.architecture if key.startswith(".") else b"") + key.encode()
        encoded = text(value) if kind == STRING else struct.pack(SCALARS[kind], value)
        self.file.values[name] = kind, encoded
        return f"{name.decode()} = {value!r}"

    def one_of(self, choices: Sequence[Any]) -> Any:
        """Return the choice with the number `serial`, or a random one if the list is shorter."""
        n = self.serial
        return choices[n] if n < len(choices) else self.random.choice(choices)


HUGE = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


def cut_at_a_border(patient: Patient) -> str:
    """Cut the file at a border of its pieces; the serials go through the borders of two models in turn."""
    borders = patient.file.borders
    place = borders[patient.serial // 2 % len(borders)]
    del patient.whole[place:]
    return f"cut at {place}"


def cut_anywhere(patient: Patient) -> str:
    end = len(patient.whole) if patient.serial % 2 else patient.file.n_head
    place = patient.random.randrange(1, end)
    del patient.whole[place:]
    return f"cut at {place}"


def magic_or_version(patient: Patient) -> str:
    versions = (0, 1, 2, 4, 2**16, 2**24 * 3, 2**31, 2**32 - 1)
    magics = (b"\0\0\0\0", b"FUGG", b"GGML", b"gguf", b"GGUX", b"\xff\xff\xff\xff")
    choices = [("<I", 4, n) for n in versions] + [("4s", 0, magic) for magic in magics]
    form, place, value = patient.one_of(choices)
    struct.pack_into(form, patient.whole, place, value)
    return f"{'magic' if place == 0 else 'version'} {value!r}"


def count(patient: Patient) -> str:
    place = (8, 16)[patient.serial % 2]
    (true,) = struct.unpack_from("<Q", patient.whole, place)
    value = patient.random.choice((*HUGE, true - 1, true + 1, true * 2, 2**20))
    struct.pack_into("<Q", patient.whole, place, value)
    return f"{'tensors' if place == 8 else 'values'}: {value} instead of {true}"


def length(patient: Patient) -> str:
    place, width = patient.random.choice(patient.file.numbers)
    before = bytes(patient.whole[place : place + width])
    true = int.from_bytes(before, "little")
    choices = (*HUGE, true - 1, true + 1, true * 2, true // 2, 2**20)
    value = patient.random.choice(choices) % 2 ** (8 * width)
    patient.whole[place : place + width] = value.to_bytes(width, "little")
    return f"{value} instead of {true} at {place}"


def _flip(patient: Patient, first: int, end: int) -> str:
    places = [patient.random.randrange(first, end) for _ in range(patient.random.randint(1, 8))]
    for place in places:
        patient.whole[place] ^= patient.random.randint(1, 255)
    return f"bytes flipped at {sorted(places)}"


def flipped_head(patient: Patient) -> str:
    """Flip bytes of the head: odd serials anywhere, even ones near a border, outside the long token lists."""
    borders = [b for b in patient.file.borders if b < patient.file.n_head]
    if patient.serial % 2:
        return _flip(patient, 0, patient.file.n_head)
    first = patient.random.choice(borders)
    return _flip(patient, first, min(first + 40, patient.file.n_head))


def flipped_weights(patient: Patient) -> str:
    return _flip(patient, patient.file.n_head, len(patient.whole))


UNSIGNED = (0, 600, 2**32 - 1, 1, 3, 7, 99_999, 2**31 - 1, 2**31)
FLOATS = (NAN, -1.0, 0.0, INF, -INF, 1e30, 1e-40)
KNOWN_NUMBERS: list[tuple[str, int, Any]] = [
    *[(".block_count", UINT32, n) for n in UNSIGNED],
    *[(".attention.layer_norm_rms_epsilon", FLOAT32, x) for x in FLOATS],
    *[(".rope.dimension_count", UINT32, n) for n in UNSIGNED],
    *[(".rope.freq_base", FLOAT32, x) for x in FLOATS],
    *[(".rope.scaling.type", STRING, x) for x in (b"yarn", b"longrope", b"nonsense", b"")],
    *[(".rope.scaling.factor", FLOAT32, x) for x in FLOATS],
    *[(".expert_count", UINT32, n) for n in UNSIGNED],
    *[(".attention.sliding_window", UINT32, n) for n in UNSIGNED],
    *[(".attention.causal", BOOL, x) for x in (False, True)],
    *[(".pooling_type", UINT32, n) for n in (0, 1, 3, 4, 99)],
    *[("general.alignment", UINT32, n) for n in (*UNSIGNED, 64)],
    *[("split.count", 2, n) for n in (0, 2, 65_535)],
    *[(".logit_scale", FLOAT32, x) for x in FLOATS],
    (".block_count", STRING, b"two"),
    (".block_count", FLOAT32, 2.0),
    (".context_length", INT32, -1),
]


def model_number(patient: Patient) -> str:
    """Change a number: even serials one of `KNOWN_NUMBERS`, odd serials one that the file has."""
    if patient.serial % 2 == 0:
        half = copy.copy(patient)
        half.serial = patient.serial // 2
        return patient.set(*half.one_of(KNOWN_NUMBERS))
    own = [
        (key, kind)
        for key, (kind, _) in patient.file.values.items()
        if kind in (UINT32, FLOAT32) and key.startswith(patient.architecture)
    ]
    key, kind = patient.random.choice(own)
    value = patient.random.choice(UNSIGNED if kind == UINT32 else FLOATS)
    return patient.set(key.decode(), kind, value)


TOKENS, TYPES = b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type"
TokenEdit = Callable[[list[bytes], random.Random], list[bytes]]
TOKEN_EDITS: dict[str, TokenEdit] = {
    "one twice": lambda t, r: [*t[:98], t[97], *t[99:]],
    "all empty": lambda t, r: [b""] * len(t),
    "all the same": lambda t, r: [b"a"] * len(t),
    "none": lambda t, r: [],
    "one too few": lambda t, r: t[:-1],
    "one too many": lambda t, r: [*t, b"more"],
    "bytes only": lambda t, r: t[:256],
    "no UTF-8": lambda t, r: [bytes([0xC0 | i % 64]) + str(i).encode() for i in range(len(t))],
    "zeros": lambda t, r: [bytes(i + 1) for i in range(len(t))],
    "one of a MiB": lambda t, r: [*t[:-1], b"x" * (1 << 20)],
    "in another order": lambda t, r: r.sample(t, len(t)),
    "some empty": lambda t, r: [b"" if r.random() < 0.1 else x for x in t],
    "some twice": lambda t, r: [r.choice(t) if r.random() < 0.05 else x for x in t],
    "spaces": lambda t, r: [b" " * i for i in range(len(t))],
}
SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "mask", "fim_pre")
VOCABULARY_VALUES: list[tuple[str, int, Any]] = [
    *[("tokenizer.ggml.model", STRING, x) for x in (
        b"bert", b"llama", b"t5", b"rwkv", b"plamo2", b"none", b"no_vocab", b"gemma4", b"", b"?")],
    *[(f"tokenizer.ggml.{name}_token_id", UINT32, n)
      for n in (2**32 - 1, 260, 2**31) for name in SPECIAL],
    *[("tokenizer.ggml.pre", STRING, x) for x in (b"", b"nonsense", b"llama-bpe", b"tekken", b"qwen2")],
    *[("tokenizer.chat_template", STRING, x) for x in (
        b"", b"{% for %}", b"{{ messages * 10**9 }}", b"\xff\xfe", b"{{" * 500)],
    ("tokenizer.ggml.add_bos_token", UINT32, 7),
    ("tokenizer.ggml.add_space_prefix", BOOL, True),
    ("tokenizer.ggml.remove_extra_whitespaces", BOOL, True),
]  # fmt: skip


def vocabulary(patient: Patient) -> str:
    """Change, depending on the serial, the tokens, a value of the vocabulary, or the types or merges."""
    values, turn, n = patient.file.values, patient.serial % 3, patient.serial // 3
    if turn == 0:
        name = list(TOKEN_EDITS)[n % len(TOKEN_EDITS)]
        tokens = TOKEN_EDITS[name](texts_of(values[TOKENS][1]), patient.random)
        values[TOKENS] = ARRAY, texts(tokens)
        return f"tokens: {name}"
    if turn == 1:
        return patient.set(*VOCABULARY_VALUES[n % len(VOCABULARY_VALUES)])
    if n % 4 == 3:
        merges = patient.random.choice(([], [b""], [b"nothing"], [b" "] * 9, [b"a b"] * 300))
        values[b"tokenizer.ggml.merges"] = ARRAY, texts(merges)
        return f"merges: {merges[:2]}"
    kind = patient.random.choice((0, 1, 2, 3, 4, 5, 6, 99, -1))
    types = [kind if patient.random.random() < 0.5 or n % 2 else 1 for _ in range(260)]
    if n % 4 == 2:
        types = types[: patient.random.choice((0, 1, 100, 259))]
    values[TYPES] = ARRAY, struct.pack(f"<IQ{len(types)}i", INT32, len(types), *types)
    return f"{len(types)} token types, of {kind}"


def architecture(patient: Patient) -> str:
    """Change the architecture's name to another or an unknown one; odd serials rename the keys, too."""
    names = ["nonsense", "", "LLAMA", *sorted(gguf.MODEL_ARCH_NAMES.values())]
    name = patient.random.choice(names) if patient.serial >= 3 else names[patient.serial]
    patient.set("general.architecture", STRING, name.encode())
    if patient.serial % 2:
        own = patient.architecture + b"."
        patient.file.values = {
            key.replace(own, name.encode() + b".", 1) if key.startswith(own) else key: value
            for key, value in patient.file.values.items()
        }
    return f"architecture {name!r}"


TYPE_SIZES = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}


def tensor_type(patient: Patient) -> str:
    """Change a tensor's type and the size of its data; every fourth serial changes only the type."""
    r, tensors = patient.random, patient.file.tensors
    kinds = [gguf.GGMLQuantizationType[k].value for k in ("I32", "F64", "I8", "F16", "BF16", "I64")]
    kind = r.choice(kinds if patient.serial % 2 else [*TYPE_SIZES, 4, 5, 99, 2**32 - 1])
    names = (b"attn_q", b"token_embd", b"attn_norm", b"output", b"ssm", b"ffn")
    wanted = names[patient.serial % len(names)]
    tensor = r.choice([t for t in tensors if wanted in t.name] or tensors)
    tensor.type = kind
    if kind in TYPE_SIZES and patient.serial % 4:
        n_block, n_bytes = TYPE_SIZES[kind]
        n_elements = 1
        for n in tensor.dims:
            n_elements *= n
        needed = -(-n_elements // n_block) * n_bytes
        tensor.data = (tensor.data * (needed // len(tensor.data) + 1))[:needed]
    return f"{tensor.name.decode()} has type {kind}"


def tensor_shape(patient: Patient) -> str:
    r, tensors = patient.random, patient.file.tensors
    tensor = r.choice(tensors)
    name = tensor.name.decode()
    turn = patient.serial % 5
    if turn == 0:
        tensors.remove(tensor)
        return f"{name} is missing"
    if turn == 1:
        tensors.append(copy.copy(tensor))
        return f"{name} twice"
    if turn == 2:
        tensor.name = r.choice((b"", b"nonsense", b"x" * 64, b"x" * 63, b"\xff", tensors[0].name))
        return f"{name} is called {tensor.name!r}"
    dims = tensor.dims
    shapes = [dims[::-1], (*dims, 1), (*dims, 2), (0, *dims[1:]), (dims[0] // 2, *dims[1:]), ()]
    shapes += [(2**63 - 1, *dims[1:]), (*dims[:-1], dims[-1] + 32), (*dims[:-1], 2**33), (1,) * 5]
    tensor.dims = r.choice([s for s in shapes if s != dims])
    return f"{name} of shape {tensor.dims} instead of {dims}"


def no_number(patient: Patient) -> str:
    """Write NaN or infinity into weights; even serials load the model with `check_tensors`."""
    r = patient.random
    patient.options["check_tensors"] = patient.serial % 2 == 0
    by_type = {0: NAN_F32, 1: NAN_F16, 2: NAN_F16, 8: NAN_F16}  # scales come first in a block
    tensor = r.choice([t for t in patient.file.tensors if t.type in by_type])
    value = r.choice(by_type[tensor.type])
    n_bytes = TYPE_SIZES[tensor.type][1]
    n_blocks = len(tensor.data) // n_bytes
    data = bytearray(tensor.data)
    n_damaged = r.choice((1, n_blocks))
    for block in r.sample(range(n_blocks), n_damaged):
        data[block * n_bytes : block * n_bytes + len(value)] = value
    tensor.data = bytes(data)
    checked = "" if patient.options["check_tensors"] else "un"
    return f"{n_damaged} x {value.hex()} in {tensor.name.decode()}, {checked}checked"


NAN_F32 = (struct.pack("<f", NAN), struct.pack("<f", INF))
NAN_F16 = (struct.pack("<e", NAN), struct.pack("<e", INF))

# Function, number of files in the corpus of 2,000, and True for structural damage.
KINDS: dict[str, tuple[Callable[[Patient], str], int, bool]] = {
    "cut at a border of its parts": (cut_at_a_border, 270, True),
    "cut anywhere": (cut_anywhere, 120, True),
    "magic or version": (magic_or_version, 60, True),
    "number of tensors or values": (count, 80, True),
    "a length, type or offset": (length, 300, True),
    "1-8 bytes of the head flipped": (flipped_head, 550, True),
    "1-8 bytes of the weights flipped": (flipped_weights, 40, True),
    "a number of the model": (model_number, 200, False),
    "the vocabulary": (vocabulary, 120, False),
    "the architecture": (architecture, 60, False),
    "type of a tensor": (tensor_type, 80, False),
    "shape or name of a tensor": (tensor_shape, 60, False),
    "NaN or infinity as weight": (no_number, 60, False),
}
N_FILES = sum(n for _, n, _ in KINDS.values())
STRIDE = 7919  # a prime, added to a serial whose file is the same as an earlier one
MAX_TRIES = 1000


Member = tuple[str, int]  # kind and serial


def damage(kind: str, serial: int) -> Damage:
    """Return the damaged file with a kind and serial; always the same bytes."""
    act, _, is_structural = KINDS[kind]
    chance = random.Random(f"{kind}/{serial}")
    index = serial % 2 if act is cut_at_a_border else chance.randrange(len(BASES))
    whole, file = base(index)
    name = BASES[index][0]
    patient = Patient(
        bytearray(whole),
        file if is_structural else copy.deepcopy(file),
        make_model.MODELS[name].architecture.encode(),
        serial,
        chance,
    )
    what = act(patient)
    data = bytes(patient.whole) if is_structural else patient.file.encoded()
    return Damage(kind, what, "-".join(BASES[index]), data, patient.options)


@cache
def corpus() -> tuple[Member, ...]:
    """Return all members of the corpus; no two files are the same, and none is undamaged."""
    seen = {hashlib.sha256(base(index)[0]).digest() for index in range(len(BASES))}
    found: list[Member] = []
    for kind, (_, n_files, _) in KINDS.items():
        for first in range(n_files):
            for serial in range(first, MAX_TRIES * STRIDE, STRIDE):
                digest = hashlib.sha256(damage(kind, serial).data).digest()
                if digest not in seen:
                    break
            else:
                raise AssertionError(f"there are fewer files than {n_files} of {kind!r}")
            seen.add(digest)
            found.append((kind, serial))
    return tuple(found)


def members(n_files: int) -> list[Member]:
    """Return `n_files` members, with each kind in proportion."""
    everything = corpus()
    return [everything[i * len(everything) // n_files] for i in range(n_files)]
