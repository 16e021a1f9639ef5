"""Rules of a server without a model: scripted answers, delays and faults by question."""

from __future__ import annotations

import json
import re
import secrets
import threading
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cllm import InvalidArgumentError
from cllm.checks import closest
from cllm.testing.fake_engine import FakeAnswer

MAX_SECONDS = 3600.0
ROLES = ("user", "tool")
ASKED = "\nassistant: "  # text after the last message of a chat, in a `FakeEngine`'s own template
SUFFIX = re.compile(r"\.[0-9a-f]{8}\Z")
ERROR_STATUSES = range(400, 600)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeRule:
    """Reaction to the questions that match the rule.

    Parameters
    ----------
    when : str
        Regular expression, searched in the question: the last message of a chat, or the prompt.
    role : str, optional
        "user" or "tool": match only if the last message has this role.  None: any role.
    times : int, optional
        Number of requests that the rule answers; after them, the next matching rule is used.  None: no limit.
    text, reasoning : str
        The answer.  In `text` and the arguments of calls, `{0}` is replaced by the match of `when`, `{1}` by
        its first group.
    tool_calls : sequence
        Mappings of `name` and `arguments`, or pairs of both.
    first_token_s, token_s : float
        Seconds before the answer begins, and before each event of a streamed answer.
    status : int, optional
        Answer with an error of this status instead, 400 to 599.
    message : str
        Text of the error.
    retry_after_s : int, optional
        Seconds in the `Retry-After` header of the error.
    disconnect_after : int, optional
        Close the connection after this number of events of a streamed answer, or before the body of another.
    """

    when: str = ""
    role: str | None = None
    times: int | None = None
    text: str = ""
    reasoning: str = ""
    tool_calls: Sequence[Any] = ()
    first_token_s: float = 0.0
    token_s: float = 0.0
    status: int | None = None
    message: str = "a scripted error"
    retry_after_s: int | None = None
    disconnect_after: int | None = None
    calls: tuple[tuple[str, str], ...] = field(default=(), init=False)  # names and arguments

    def __post_init__(self) -> None:
        _check(self)
        object.__setattr__(self, "calls", FakeAnswer(tool_calls=self.tool_calls).tool_calls)

    def answer(self, question: str) -> FakeAnswer:
        """Return the answer to a question that matches, with its placeholders filled in."""
        found = re.search(self.when, question)
        groups = [] if found is None else [found[0], *(group or "" for group in found.groups())]

        def filled(text: str, written: Sequence[str]) -> str:
            # In one pass: a group may contain a placeholder.
            return re.sub(
                r"\{(\d+)\}",
                lambda at: written[int(at[1])] if int(at[1]) < len(written) else at[0],
                text,
            )

        in_json = [json.dumps(group)[1:-1] for group in groups]
        calls = [(name, filled(arguments, in_json)) for name, arguments in self.calls]
        return FakeAnswer(filled(self.text, groups), self.reasoning, calls)


class FakeRules:
    """Rules in order: the first one that matches a question and is not used up answers it.

    Any thread.
    """

    def __init__(self, rules: Iterable[FakeRule]) -> None:
        self._rules = tuple(rules)
        self._n_left = [rule.times for rule in self._rules]
        self._lock = threading.Lock()
        self._open: dict[str, tuple[FakeRule, Sequence[str]]] = {}  # by the id of a request

    @classmethod
    def of(cls, given: object) -> FakeRules:
        """Return rules from a list of mappings, a mapping with `rules`, or one from questions to answers.

        In a mapping from questions to answers, an answer is given to all questions that end with its key.

        Raises
        ------
        InvalidArgumentError
            Names the rule, the field and the allowed values.
        """
        if isinstance(given, Mapping) and set(given) == {"rules"}:
            given = given["rules"]
        elif isinstance(given, Mapping):
            given = [
                {"when": re.escape(str(question)) + r"\Z", "text": answer}
                for question, answer in given.items()
            ]
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise InvalidArgumentError("rules", given, "a list of rules")
        return cls(_rule(number, each) for number, each in enumerate(given))

    @classmethod
    def read(cls, path: Path) -> FakeRules:
        """Return the rules of a file: `.toml`, `.json`, or YAML with any other suffix.

        Raises
        ------
        InvalidArgumentError
            The file cannot be read, a rule in it is invalid, or it is YAML and PyYAML is not installed.
        """
        try:
            text = path.read_text(encoding="utf-8-sig")
            if path.suffix == ".toml":
                return cls.of(tomllib.loads(text))
            if path.suffix == ".json":
                return cls.of(json.loads(text))
        except OSError as error:
            raise _unreadable(path, error.strerror or str(error)) from None
        except ValueError as error:
            raise _unreadable(path, str(error)) from None
        return cls.of(_yaml(path, text))

    def choose(self, question: str, role: str = "user") -> FakeRule | None:
        """Choose the rule for a question, and count it as used; None if no rule matches.

        Parameters
        ----------
        role : str
            Role of the last message.
        """
        with self._lock:
            for number, rule in enumerate(self._rules):
                if self._n_left[number] == 0 or rule.role not in (None, role):
                    continue
                if re.search(rule.when, question):
                    n_left = self._n_left[number]
                    self._n_left[number] = None if n_left is None else n_left - 1
                    return rule
        return None

    @contextmanager
    def answering(self, request_id: str, rule: FakeRule, questions: Sequence[str]) -> Iterator[str]:
        """Answer the questions of a request by a rule inside the block.

        Yield the id that the request must have: another one if a request of this id is open.
        """
        with self._lock:
            while not request_id or request_id in self._open:
                request_id = secrets.token_hex(8)
            self._open[request_id] = rule, questions
        try:
            yield request_id
        finally:
            with self._lock:
                del self._open[request_id]

    def answer(self, request_id: str, prompt: str) -> FakeAnswer:
        """Return the answer to a prompt of a request.

        Parameters
        ----------
        request_id : str
            Of an open request, or that with "/" and a suffix.  Another request gets the first rule that
            matches its prompt.

        Raises
        ------
        LookupError
            No rule matches.
        """
        whole = request_id.partition("/")[0]
        with self._lock:  # the server adds a suffix to an id that the engine still has
            found = self._open.get(whole) or self._open.get(SUFFIX.sub("", whole))
        if found is None:
            if (rule := self.choose(prompt)) is None:
                raise LookupError("no rule is for it")
            return rule.answer(prompt)
        rule, questions = found
        asked = [each for each in questions if prompt == each or prompt.endswith(each + ASKED)]
        return rule.answer(max(asked, key=len, default=questions[0]))


def _rule(number: int, given: object) -> FakeRule:
    name = f"rules[{number}]"
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(name, given, "a mapping")
    known = {each.name for each in fields(FakeRule) if each.init}
    for key in given:
        if key not in known:
            near = closest(str(key), known)
            limit = f"of {', '.join(sorted(known))}" if near is None else f"called {near!r}"
            raise InvalidArgumentError(f"{name}.{key}", given[key], limit)
    try:
        return FakeRule(**given)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{name}.{error.field}", error.value, error.limit) from None


def _check(rule: FakeRule) -> None:
    """Reject values that a rule cannot have."""
    try:
        re.compile(rule.when).search("")
    except (re.error, TypeError) as error:
        raise InvalidArgumentError("when", rule.when, f"a regular expression: {error}") from None
    if rule.role not in (None, *ROLES):
        raise InvalidArgumentError("role", rule.role, f"one of {', '.join(ROLES)}")
    for name in ("text", "reasoning", "message"):
        if not isinstance(getattr(rule, name), str):
            raise InvalidArgumentError(name, getattr(rule, name), "a text")
    for name in ("times", "retry_after_s", "disconnect_after"):
        value = getattr(rule, name)
        if value is not None and (type(value) is not int or value < 0):
            raise InvalidArgumentError(name, value, "a number from 0 on")
    for name in ("first_token_s", "token_s"):
        value = getattr(rule, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgumentError(name, value, "a number")
        if not 0 <= value <= MAX_SECONDS:
            raise InvalidArgumentError(name, value, f"0 to {MAX_SECONDS:g} seconds")
    if rule.status is not None and (
        type(rule.status) is not int or rule.status not in ERROR_STATUSES
    ):
        raise InvalidArgumentError("status", rule.status, "an error, 400 to 599")


def _yaml(path: Path, text: str) -> object:
    try:
        import yaml
    except ImportError:
        limit = ".toml or .json without PyYAML: pip install 'cllm[testing]'"
        raise _unreadable(path, limit) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _unreadable(path, f"YAML: {error}") from None


def _unreadable(path: Path, reason: str) -> InvalidArgumentError:
    # Only the file name: the error cuts off the end of long values.
    return InvalidArgumentError("rules", path.name, f"a file of rules: {reason}")
