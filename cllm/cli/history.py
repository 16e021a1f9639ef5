"""The messages of a chat, and how many of them fit the context.  Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cllm import Audio, Image

Message = dict[str, Any]
Messages = list[Message]
Media = tuple[Image | Audio, ...]
CLASSES: dict[str, type[Image] | type[Audio]] = {"image": Image, "audio": Audio}

# Estimated tokens that a chat template adds around a message.
N_AROUND = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and its answer.

    Attributes
    ----------
    said : tuple of message
        Messages after it: calls of tools and their results, and at last the answer.
    n_tokens : int
        Tokens of the last prompt, which has all earlier turns, and of the answer; 0: unknown.
    media : tuple of Image and Audio
        Images and recordings before the message.
    """

    message: str
    said: tuple[Message, ...]
    n_tokens: int
    media: Media = ()

    @property
    def texts(self) -> list[str]:
        """Texts that count as tokens of the turn."""
        calls = [
            call["function"]["arguments"] for m in self.said for call in m.get("tool_calls", ())
        ]
        return [self.message, *(m["content"] or "" for m in self.said), *calls]


class History:
    """The turns of a chat.

    Parameters
    ----------
    system : str or None
        System message: comes first, and is never dropped.
    n_ctx : int
        Tokens of the context.

    Attributes
    ----------
    turns : list of Turn
    system : str or None
    """

    def __init__(self, system: str | None, *, n_ctx: int) -> None:
        self.turns: list[Turn] = []
        self.n_ctx = n_ctx
        self.system = system

    @property
    def n_tokens(self) -> int:
        """Maximum number of tokens of the chat in the context; 0 for an empty chat.

        The real number is smaller if the template omits something, such as the thoughts before an answer.
        """
        return self.turns[-1].n_tokens if self.turns else 0

    def messages(self, turns: Sequence[Turn], message: str | None, media: Media = ()) -> Messages:
        """Return these turns and one more message with its media, as the engine takes them."""
        messages: Messages = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for turn in turns:
            messages += [_of_user(turn.message, turn.media), *turn.said]
        return messages if message is None else [*messages, _of_user(message, media)]

    def all_messages(self) -> Messages:
        """Return all messages."""
        return self.messages(self.turns, None)

    async def fitting(
        self,
        message: str,
        media: Media = (),
        *,
        n_answer_max: int | None = None,
        count: Callable[[str], Awaitable[int]],
        count_prompt: Callable[[Messages], Awaitable[int]],
    ) -> list[Turn]:
        """Return the turns that leave room for a message and its answer: all, or the last ones.

        Room for an answer is a quarter of the context at most.  The history is not changed: the message may
        turn out not to be answerable at all.

        Parameters
        ----------
        n_answer_max : int, optional
            Maximum number of tokens of the answer.
        count : callable
            Returns the number of tokens of a text.
        count_prompt : callable
            Returns the number of tokens of a prompt.  It may be slow, and is called only for a prompt that
            may not fit.
        """
        n_spare = max(1, self.n_ctx // 4)
        n_room = self.n_ctx - min(n_spare, n_answer_max or n_spare)
        if not self.turns:
            return []
        if not media and self.n_tokens + await count(message) + N_AROUND <= n_room:
            return list(self.turns)
        n_prompt = await count_prompt(self.messages(self.turns, message, media))
        if n_prompt <= n_room:
            return list(self.turns)
        # After a drop the rest of the chat is computed again: drop seldom, and down to half the context.
        n_wanted = self.n_ctx // 2
        kept = list(self.turns)
        while kept and n_prompt > n_wanted:
            dropped = kept.pop(0)
            if dropped.media:
                n_prompt = await count_prompt(self.messages(kept, message, media))
            else:
                n_prompt -= sum([await count(text) for text in dropped.texts])
        return kept

    def keep(self, turns: list[Turn]) -> int:
        """Drop all other turns, and return their number."""
        n_dropped = len(self.turns) - len(turns)
        self.turns = turns
        return n_dropped

    def undo(self) -> Turn | None:
        """Remove the last turn and return it; None if there is none."""
        return self.turns.pop() if self.turns else None

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.turns.clear()


def parts_of(media: Media) -> list[Message]:
    """Return images and recordings as parts of a content."""
    return [{"type": each.kind, each.kind: each} for each in media]


def _of_user(message: str, media: Media) -> Message:
    if not media:
        return {"role": "user", "content": message}
    parts = parts_of(media)
    return {"role": "user", "content": [*parts, {"type": "text", "text": message}]}


def _from_user(content: Any) -> tuple[str, Media]:
    """Return the text of a user's message, and its media: paths of files stand for them."""
    if isinstance(content, str):
        return content, ()
    *media, text = content
    is_text = text["type"] == "text" and isinstance(text["text"], str)
    if not is_text or any(part["type"] not in CLASSES for part in media):
        raise ValueError("a message has images and recordings, and then one text")
    return text["text"], tuple(CLASSES[part["type"]](part[part["type"]]) for part in media)


def turns_of(messages: Messages) -> tuple[str | None, list[Turn]]:
    """Return the system message and the turns of a chat; their token counts are unknown.

    Raises
    ------
    ValueError
        The messages are not turns of a user's message and an answer.
    """
    rest, turns, system = list(messages), list[Turn](), None
    if rest and rest[0]["role"] == "system":
        system = str(rest.pop(0)["content"])
    while rest:
        first, said = rest.pop(0), list[Message]()
        if first["role"] != "user":
            raise ValueError("a turn begins with a message of the user")
        message, media = _from_user(first["content"])
        while rest and rest[0]["role"] in ("assistant", "tool"):
            said.append(rest.pop(0))
        if not said:
            raise ValueError("a message has no answer")
        turns.append(Turn(message, tuple(said), n_tokens=0, media=media))
    return system, turns
