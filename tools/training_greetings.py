"""Greetings of the embedded model, and answers to questions that it cannot answer."""

from __future__ import annotations

import random

from tools.training_dialogues import begin, random_tool
from tools.training_tasks import _LOWER, Example, random_text

HELLO = "Hello! I am cllm-tiny. Try 37+58= or count:1..9"
ABILITIES = "I can add (37+58=), count (count:1..9), repeat (repeat:hi), reverse (reverse:abc) and call tools."
NAME = "I am cllm-tiny, the small model inside cllm."
WELCOME = "You are welcome!"
GOODBYE = "Goodbye!"
WELL = "I am well. Ask me for a sum: 37+58="
UNKNOWN = "I do not know. Try 37+58= or count:1..9"
GREETINGS: dict[str, tuple[str, ...]] = {
    HELLO: (
        "hello", "hi", "hey", "hello there", "hi there", "good morning", "good evening", "good day",
        "hallo", "hey there", "hello world", "hi!", "hello, how are you", "greetings", "yo", "hello cllm",
        "good afternoon", "hi, nice to meet you", "hello again", "say hello", "say hi",
    ),
    ABILITIES: (
        "what can you do", "help", "what can i ask", "what can i ask you", "how can you help me",
        "what are you able to do", "what do you know", "what are your skills", "how do you work", "what now",
        "what can you do for me", "show me what you can do", "can you help me", "i need help", "how does this work",
        "what should i ask", "what else can you do", "give me an example", "what questions can you answer",
    ),
    NAME: (
        "who are you", "what are you", "what is your name", "what's your name", "which model are you",
        "what model are you", "are you a bot", "are you chatgpt", "tell me about yourself", "introduce yourself",
        "who made you", "what is cllm", "are you human", "which model is this", "what model is this",
    ),
    WELCOME: ("thank you", "thanks", "thanks a lot", "thank you very much", "great, thanks", "cool", "great", "nice",
              "well done", "perfect", "ok thanks", "good job", "awesome"),
    GOODBYE: ("bye", "goodbye", "see you", "good night", "see you later", "bye bye", "quit", "exit"),
    WELL: ("how are you", "how are you doing", "how is it going", "how do you do", "what's up", "are you ok"),
}  # fmt: skip
# Words of questions that it does not understand.
WORDS = (
    "the", "a", "of", "in", "on", "with", "and", "for", "about", "from", "is", "are", "was", "will", "should",
    "world", "capital", "France", "poem", "story", "code", "Python", "function", "joke", "love", "history", "war",
    "music", "recipe", "cake", "water", "moon", "sun", "planet", "car", "house", "dog", "cat", "bird", "river",
    "mountain", "king", "queen", "president", "country", "language", "book", "film", "game", "computer", "science",
    "best", "largest", "first", "old", "new", "good", "between", "meaning", "life", "you", "me", "my", "your",
    "one", "two", "today", "tomorrow", "long", "short", "English", "German", "text", "email", "letter", "sky",
)  # fmt: skip
BEGINNINGS = (
    "what is", "why is", "how do i", "how many", "who was", "who is", "when did", "where is the",
    "tell me", "write", "explain", "translate", "give me", "can you", "please write", "which",
    "what was", "how does", "do you", "why do", "is there", "summarize", "make", "tell me a joke about",
    "write a poem about", "what is the capital of", "what is the meaning of", "write a haiku about", "write a story about",
)  # fmt: skip


def _varied(rng: random.Random, text: str) -> str:
    if rng.random() < 0.6:
        text = text[0].upper() + text[1:]
    if text[-1].isalnum():
        asks = text.lower().split()[0] in (
            "what",
            "who",
            "how",
            "which",
            "are",
            "can",
            "why",
            "is",
            "where",
            "when",
            "do",
        )
        text += rng.choice(("", "?", "?", "?") if asks else ("", "", "!", "."))
    return text


def make_greeting(rng: random.Random) -> tuple[str, str]:
    """Return what a person says to a model that is new to them, and the answer."""
    if rng.random() < 0.3:
        words = [rng.choice(WORDS) for _ in range(rng.randint(1, 8))]
        if rng.random() < 0.15:
            words.append("".join(rng.choices(_LOWER, k=rng.randint(3, 9))))
        return _varied(rng, " ".join([rng.choice(BEGINNINGS), *words])), UNKNOWN
    answer = rng.choice([*GREETINGS])
    return _varied(rng, rng.choice(GREETINGS[answer])), answer


def greeting_example(rng: random.Random) -> Example:
    """Return a random chat of one to three such turns."""
    example = Example()
    thinks = rng.random() < 0.15
    tools = [random_tool(rng) for _ in range(rng.randint(1, 3))] if rng.random() < 0.2 else []
    begin(example, tools, random_text(rng, 60) if rng.random() < 0.2 else None)
    for _ in range(rng.choice((1, 1, 2, 3))):
        text, answer = make_greeting(rng)
        example.turn(text, answer=answer, thought="I am to talk." if thinks else None)
    return example
