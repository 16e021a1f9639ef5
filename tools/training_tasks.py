"""Training tasks of the embedded model: questions of four tasks with their answers, and text to distract it.

Questions whose hash falls into one bucket of twenty are never trained on (sums excepted: all 10,000
are trained), so that the accuracy of the other tasks is measured on questions training never saw.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from tools.tiny_vocabulary import ANSWER, BOS, END, START

HELD_OUT_BUCKETS = 20
MAX_REPEAT_BYTES = 48
MAX_REVERSE_LETTERS = 12
MAX_COUNT = 999
MAX_NOTE_TOKENS = 400

_COMMON_HAN = [chr(c) for c in range(0x4E00, 0x9FA6)]
_EMOJI = [
    chr(c)
    for lo, hi in ((0x1F300, 0x1F650), (0x1F680, 0x1F6D3), (0x1F900, 0x1F9FF), (0x2600, 0x26FF))
    for c in range(lo, hi)
]
_LATIN = [chr(c) for c in range(0xC0, 0x250)]
_GREEK_CYRILLIC_KANA = [
    chr(c)
    for lo, hi in ((0x391, 0x3CA), (0x410, 0x450), (0x3041, 0x30FF), (0x5D0, 0x5EB), (0x627, 0x64B))
    for c in range(lo, hi)
]
_LOWER = [chr(c) for c in range(97, 123)]
_LETTERS = [chr(c) for c in (*range(65, 91), *range(97, 123))]
_DIGITS = [chr(c) for c in range(48, 58)]
_PRINTABLE = [chr(c) for c in range(32, 127)]
_PUNCTUATION = [
    chr(c)
    for lo, hi in (
        (0x2010, 0x2040),
        (0x3000, 0x3020),
        (0xFF01, 0xFF5F),
        (0x20A0, 0x20C0),
        (0x2190, 0x2200),
    )
    for c in range(lo, hi)
]
# A sample of all code points of two to four bytes: copying must not depend on the alphabet.
_ANY = [
    chr(c)
    for c in (
        *range(0x80, 0x800, 3),
        *range(0x800, 0xD800, 80),
        *range(0xE000, 0x10000, 60),
        *range(0x10000, 0x110000, 1500),
    )
]
_ALPHABETS = (
    (_LOWER, 4),
    (_LETTERS, 2),
    (_DIGITS, 2),
    (_PRINTABLE, 3),
    (_COMMON_HAN, 4),
    (_EMOJI, 3),
    (_LATIN, 1),
    (_GREEK_CYRILLIC_KANA, 2),
    (_PUNCTUATION, 1),
    (_ANY, 4),
)
_ALPHABET_CHOICES = [alphabet for alphabet, weight in _ALPHABETS for _ in range(weight)]


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a task and its answer, both as plain text."""

    task: str
    prompt: str
    answer: str

    @property
    def held_out(self) -> bool:
        """True if training must not see the question.  Every sum may be trained on."""
        return self.task != "sum" and zlib.crc32(self.prompt.encode()) % HELD_OUT_BUCKETS == 0


def random_text(rng: random.Random, max_bytes: int, min_chars: int = 1) -> str:
    """Return random text without newlines, of at most `max_bytes` bytes of UTF-8, in one of five styles."""
    alphabets = rng.choices(_ALPHABET_CHOICES, k=rng.choice((1, 1, 1, 2, 3)))
    style = rng.random()
    n_chars = rng.randint(min_chars, max(min_chars, rng.choice((4, 8, 16, 32, max_bytes))))
    if style < 0.10:  # few distinct characters: copying by content alone fails here
        pool = [rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 3))]
        chars = rng.choices(pool, k=n_chars)
    elif style < 0.20:  # words
        words = ["".join(rng.choices(_LOWER, k=rng.randint(1, 8))) for _ in range(n_chars // 4 + 1)]
        chars = list(" ".join(words))
    elif style < 0.35:  # sentences: words of any script, spaces, a punctuation mark here and there
        words = [
            "".join(rng.choices(rng.choice(_ALPHABET_CHOICES), k=rng.randint(1, 6)))
            + (rng.choice(_PUNCTUATION + [".", ",", "!", "?"] * 30) if rng.random() < 0.3 else "")
            for _ in range(n_chars // 3 + 1)
        ]
        chars = list(rng.choice((" ", " ", "")).join(words))
    elif style < 0.40:  # text that looks like a question
        chars = list(
            rng.choice(
                (
                    f"{rng.randint(0, 99)}+{rng.randint(0, 99)}=",
                    "repeat:",
                    "reverse:",
                    "note:",
                    f"count:{rng.randint(0, 99)}..{rng.randint(0, 99)}",
                )
            )
            + "".join(rng.choices(_LOWER, k=rng.randint(0, 6)))
        )
    else:
        chars = [rng.choice(rng.choice(alphabets)) for _ in range(n_chars)]
    n_bytes, kept = 0, []
    for char in chars:
        n_bytes += len(char.encode())
        if n_bytes > max_bytes:
            break
        kept.append(char)
    return "".join(kept) or "x"


def make_sum(rng: random.Random) -> Question:
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    return Question("sum", f"{a}+{b}=", str(a + b))


def make_repeat(rng: random.Random) -> Question:
    text = random_text(rng, MAX_REPEAT_BYTES)
    return Question("repeat", f"repeat:{text}", text)


def make_reverse(rng: random.Random) -> Question:
    word = "".join(
        rng.choices(
            _LETTERS if rng.random() < 0.3 else _LOWER, k=rng.randint(1, MAX_REVERSE_LETTERS)
        )
    )
    if rng.random() < 0.1:
        word = "".join(rng.choices(word[:2], k=len(word)))
    return Question("reverse", f"reverse:{word}", word[::-1])


def make_count(rng: random.Random, max_numbers: int = 12, p_long: float = 0.0) -> Question:
    n_numbers = min(int(math.exp(rng.uniform(0, math.log(max_numbers + 1)))), max_numbers)
    if rng.random() < p_long:
        n_numbers = rng.randint(1, max_numbers)
    highest = 99 if n_numbers < 100 and rng.random() < 0.4 else MAX_COUNT
    first = rng.randint(0, highest + 1 - n_numbers)
    if rng.random() < 0.15:  # past 9 or 99, where the numbers grow longer: rare otherwise
        first = max(0, rng.choice((10, 100)) - rng.randint(1, n_numbers))
    last = first + n_numbers - 1
    answer = " ".join(str(n) for n in range(first, last + 1))
    return Question("count", f"count:{first}..{last}", answer)


def make_note(rng: random.Random, max_tokens: int) -> str:
    """Return a random text for the beginning of a prompt; the answer must not depend on it."""
    budget = rng.randint(1, max_tokens)
    lines: list[str] = []
    while budget > 0:
        text = random_text(rng, budget, min_chars=min(budget, 24))
        lines.append(text)
        budget -= len(text.encode())
    return "note:" + "".join(lines) + "\n"


@dataclass(slots=True)
class Example:
    """Training example.

    Attributes
    ----------
    tokens : list of int
    asked : list of int
        For each token 1 if the model writes the *next* one, else 0.
    """

    tokens: list[int] = field(default_factory=lambda: [BOS])
    asked: list[int] = field(default_factory=lambda: [0])

    def say(self, *parts: int | str, asked: bool = False) -> None:
        """Append control tokens and texts."""
        ids = [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]
        if asked:
            self.asked[-1] = 1
        self.tokens += ids
        self.asked += [int(asked)] * (len(ids) - 1) + [0] * bool(ids)

    def turn(self, *asked: str, answer: str, thought: str | None = None) -> None:
        """Append what a user asks and what the model answers, as the chat template writes them."""
        self.say(START, "user\n", *asked, END, "\n")
        self.answer(answer, thought)

    def answer(self, text: str, thought: str | None = None) -> None:
        """Append an answer of the model; a model that thinks writes its thought first."""
        thinks = thought is not None
        self.say(START, "assistant\n" + ("<think>\n" if thinks else ""))
        self.say((f"{thought}\n</think>\n\n" if thinks else "") + text, END, asked=True)
        self.say("\n")

    def system(self, text: str) -> None:
        """Append a system message."""
        self.say(START, "system\n" + text, END, "\n")


def encode_example(questions: list[Question], note: str, chat: bool, system: str | None) -> Example:
    """Return the example of questions: turns of a chat, or the first one alone."""
    example = Example()
    if chat:
        if system is not None:
            example.system(system)
        for question in questions:
            example.turn(note + question.prompt, answer=question.answer)
            note = ""
    else:
        example.say(note + questions[0].prompt)
        # The "=" of a sum ends the question; for other tasks the model's answer begins with a marker.
        marker = [] if questions[0].task == "sum" else [ANSWER]
        example.say(*marker, questions[0].answer, END, asked=True)
    return example


def confusable_stops(tokens: list[int], asked: list[int]) -> list[int]:
    """Return the position of the end of each number with the same last two digits as the answer's last number.

    There a count may look finished, and only at the last position it is.  Such a position is one token in
    hundreds, so that the model hardly learns it without a weight of its own.
    """
    ends, places, number = [], [], []
    for place in range(1, len(tokens)):
        if not asked[place - 1]:
            continue  # this token is not part of an answer
        if 48 <= tokens[place] <= 57:
            number.append(tokens[place])
            continue
        ends.append((place - 1, tuple(number[-2:])))
        number = []
        if tokens[place] == END:
            last = ends[-1][1]
            places += [p for p, digits in ends if digits and digits == last]
            ends = []
    return places


MAKERS: dict[str, Callable[[random.Random], Question]] = {
    "sum": make_sum,
    "repeat": make_repeat,
    "reverse": make_reverse,
    "count": make_count,
}

ALL_SUMS = [Question("sum", f"{a}+{b}=", str(a + b)) for a in range(100) for b in range(100)]


def held_out_questions(
    maker: Callable[[random.Random], Question], n: int, seed: int
) -> list[Question]:
    rng = random.Random(seed)
    kept: list[Question] = []
    while len(kept) < n:
        question = maker(rng)
        if question.held_out or question.task == "sum":
            kept.append(question)
    return kept
