"""The rules of a GBNF grammar, and what llama.cpp would make of them.  Pure.

llama.cpp follows a grammar as a set of stacks.  A grammar is refused where reading it, or the size
of that set, would take more time or memory than a request may have, and where following it would
end the process.  Every pass takes time in proportion to the grammar.  What depends on the
vocabulary, or on the text that was written so far, is not seen here: `trial` tries it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MAX_REFERENCE_CHAIN = 256
# 0.2 s for each token of a vocabulary of 128,000, and growing with the square.
MAX_EMPTY_REPETITIONS = 16
MAX_EMPTY_RUN = 64
MAX_REPETITION_PRODUCT = 2_000
# llama.cpp walks every path through the first parts of rules: 10 million steps are 0.15 s.
MAX_WALK = 10_000_000

# A set of characters is an integer: a bit for each of ASCII, and one for all the others.
NON_ASCII = 1 << 128
NAMED_TOKEN = 1 << 129  # `<text>`
OTHER_TOKEN = 1 << 130  # `<[id]>`, `!<text>`, `!<[id]>`
MAX_CODE_POINT = 0x10FFFF


@dataclass(slots=True)
class Item:
    """One part of an alternative, repeated `low` to `high` times.

    Attributes
    ----------
    at : int
        Where it is in the text.
    rule : int or None
        Index of the rule that it refers to, or of the group that it is.
    first : int
        The set of what it begins with, if it is not a rule.
    literal : str or None
        Its characters, if it is a string.
    high : int or None
        None is without end.
    size, n_rules : int
        How many elements llama.cpp makes of it, and its count of the rules in it.
    """

    at: int
    rule: int | None
    first: int = 0
    literal: str | None = None
    low: int = 1
    high: int | None = 1
    size: int = 1
    n_rules: int = 1

    @property
    def repeats(self) -> bool:
        """Whether it may come twice in a row."""
        return self.high is None or self.high > 1


@dataclass(slots=True)
class Rule:
    """A named rule, or a group within one, which is a rule to llama.cpp as well."""

    at: int
    named: bool
    alternatives: list[list[Item]] = field(default_factory=list)

    def items(self) -> Iterator[Item]:
        """All parts of all alternatives."""
        for alternative in self.alternatives:
            yield from alternative


class GrammarFault(Exception):
    """The text at position `at` is not what `limit` says."""

    def __init__(self, at: int, limit: str) -> None:
        super().__init__(at, limit)
        self.at = at
        self.limit = limit


def check_rules(rules: Sequence[Rule], token_texts: Sequence[str]) -> None:
    """Refuse rules that llama.cpp must not be given.

    Parameters
    ----------
    rules : sequence of Rule
        All of them defined.
    token_texts : sequence of str
        Every `<text>` that the grammar has, with its brackets.

    Raises
    ------
    GrammarFault
    """
    empty = _may_be_empty(rules)
    first, slack = _walk(rules, empty)
    _check_empty_repetitions(rules, empty, slack)
    follows = [
        list(_with_follow(rule, empty, first, after))
        for rule, after in zip(rules, _follow(rules, empty, first), strict=True)
    ]
    _check_tokens(follows, token_texts)
    _check_products(rules, first, follows)


def _may_be_empty(rules: Sequence[Rule]) -> list[bool]:
    """For each rule, whether it can match the empty text."""
    empty = [False] * len(rules)
    users: list[list[tuple[int, list[int]]]] = [[] for _ in rules]
    done: list[int] = []
    for index, rule in enumerate(rules):
        for alternative in rule.alternatives:
            needed = [item.rule for item in alternative if item.low]
            if None in needed:
                continue
            waits = [len(needed)]  # shared by the rules that the alternative waits for
            for other in needed:
                assert other is not None
                users[other].append((index, waits))
            if not needed:
                done.append(index)
    while done:
        index = done.pop()
        if empty[index]:
            continue
        empty[index] = True
        for user, waits in users[index]:
            waits[0] -= 1
            if not waits[0]:
                done.append(user)
    return empty


def _is_empty(item: Item, empty: Sequence[bool]) -> bool:
    return item.low == 0 or (item.rule is not None and empty[item.rule])


def _leading(alternative: Sequence[Item], empty: Sequence[bool]) -> Iterator[Item]:
    """The parts that a match of the alternative may begin with."""
    for item in alternative:
        yield item
        if not _is_empty(item, empty):
            return


def components(graph: Sequence[Sequence[int]]) -> list[list[int]]:
    """The strongly connected components, each after all that it leads to (Tarjan, iterative)."""
    seen: dict[int, int] = {}  # in order of their numbers
    lowest: dict[int, int] = {}  # of the nodes on the path
    path: list[int] = []
    found: list[list[int]] = []
    for root in range(len(graph)):
        todo = [] if root in seen else [(root, iter(graph[root]))]
        while todo:
            node, successors = todo[-1]
            if node not in seen:
                seen[node] = lowest[node] = len(seen)
                path.append(node)
            for successor in successors:
                if successor not in seen:
                    todo.append((successor, iter(graph[successor])))
                    break
                if successor in lowest:
                    lowest[node] = min(lowest[node], lowest[successor])
            else:
                todo.pop()
                if lowest[node] == seen[node]:
                    start = path.index(node, -1 if path[-1] == node else 0)
                    found.append(path[start:])
                    del path[start:]
                    for member in found[-1]:
                        del lowest[member]
                if todo and node in lowest:
                    parent = todo[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[node])
    return found


def _walk(rules: Sequence[Rule], empty: Sequence[bool]) -> tuple[list[int], list[int]]:
    """What each rule begins with, and how many parts of it an empty match passes by.

    Along the first parts of rules, as llama.cpp walks to find left recursion: without a memory, so
    in `a ::= b | b` it visits b twice, and everything that b begins with.
    """
    leading = [
        [part for parts in rule.alternatives for part in _leading(parts, empty)] for rule in rules
    ]
    first, slack = [0] * len(rules), [0] * len(rules)
    depth, steps = [0] * len(rules), [0] * len(rules)
    for component in components(
        [[p.rule for p in parts if p.rule is not None] for parts in leading]
    ):
        index = component[0]
        rule, parts = rules[index], leading[index]
        if len(component) > 1 or any(part.rule == index for part in parts):
            raise GrammarFault(rule.at, "a rule that does not begin with itself (left recursion)")
        steps[index] = sum(item.size for item in rule.items()) + len(rule.alternatives)
        for part in parts:
            first[index] |= part.first if part.rule is None else first[part.rule]
            if part.rule is not None:
                passes = (part.high or 1) if empty[part.rule] else 1
                steps[index] += passes * (1 + steps[part.rule])
                depth[index] = max(depth[index], depth[part.rule])
        depth[index] += rule.named
        if depth[index] > MAX_REFERENCE_CHAIN:
            limit = f"rules that begin with rules at most {MAX_REFERENCE_CHAIN} deep"
            raise GrammarFault(rule.at, limit)
        if empty[index]:
            slack[index] = max(
                1,
                sum(
                    sum(_slack(item, empty, slack) for item in parts)
                    for parts in rule.alternatives
                    if all(_is_empty(item, empty) for item in parts)
                ),
            )
    _check_steps(rules, steps)
    return first, slack


def _check_steps(rules: Sequence[Rule], steps: Sequence[int]) -> None:
    """Refuse what llama.cpp's walk would take too long for; `steps` is what each rule takes."""
    n_steps = 0
    for index, rule in enumerate(rules):
        n_steps += steps[index]
        for item in rule.items():
            # llama.cpp makes rules of a repetition, and begins its walk at each of them.
            n_made = 1 if item.high is None else item.high - item.low
            n_steps += n_made * (1 + (0 if item.rule is None else steps[item.rule]))
        if n_steps > MAX_WALK:
            raise GrammarFault(rule.at, "a rule with fewer ways to its first character")


def _slack(item: Item, empty: Sequence[bool], slack: Sequence[int]) -> int:
    """How many parts an empty match of `item` passes by."""
    if not _is_empty(item, empty):
        return 0
    if item.rule is None or not empty[item.rule]:
        return 1  # `x{0,9}` is (x (x …)?)? to llama.cpp
    return slack[item.rule] * (item.high or 1)


def _check_empty_repetitions(
    rules: Sequence[Rule], empty: Sequence[bool], slack: Sequence[int]
) -> None:
    """Refuse what llama.cpp would follow as too many stacks at once.

    It keeps a stack for each part that a match may go on with: after k parts that may be empty
    there are k + 1, each of which gives up to k + 1 at the next character.
    """
    for rule in rules:
        for alternative in rule.alternatives:
            run = 0
            for item in alternative:
                n_parts = _slack(item, empty, slack)
                if item.repeats and item.rule is not None and empty[item.rule]:
                    # `(x*)*` is followed as `x*` is; with more parts in it, each may go on.
                    if item.high is None and slack[item.rule] > 1:
                        limit = "no * or + of several parts that may all be empty"
                        raise GrammarFault(item.at, limit)
                    if n_parts > MAX_EMPTY_REPETITIONS:
                        limit = f"at most {MAX_EMPTY_REPETITIONS} times something that may be empty"
                        raise GrammarFault(item.at, limit)
                run = run + n_parts if n_parts else 0
                if run > MAX_EMPTY_RUN:
                    limit = f"at most {MAX_EMPTY_RUN} parts in a row that may be empty"
                    raise GrammarFault(item.at, limit)


def _follow(rules: Sequence[Rule], empty: Sequence[bool], first: Sequence[int]) -> list[int]:
    """What can come after each rule."""
    after = [0] * len(rules)
    ends: list[list[int]] = [[] for _ in rules]  # the rules that a match of each may end with
    for index, rule in enumerate(rules):
        for alternative in rule.alternatives:
            at_end, mask = True, 0
            for item in reversed(alternative):
                start = item.first if item.rule is None else first[item.rule]
                if item.rule is not None:
                    after[item.rule] |= mask | (start if item.repeats else 0)
                    if at_end:
                        ends[index].append(item.rule)
                if _is_empty(item, empty):
                    mask |= start
                else:
                    at_end, mask = False, start
    for component in reversed(components(ends)):
        together = 0
        for index in component:
            together |= after[index]
        for index in component:
            after[index] = together
            for end in ends[index]:
                after[end] |= together
    return after


def _with_follow(
    rule: Rule, empty: Sequence[bool], first: Sequence[int], after: int
) -> Iterator[tuple[Item, int]]:
    """Each part of a rule with what can come after it, itself not counted."""
    for alternative in rule.alternatives:
        mask = after
        for item in reversed(alternative):
            yield item, mask
            start = item.first if item.rule is None else first[item.rule]
            mask = mask | start if _is_empty(item, empty) else start


def _check_tokens(
    follows: Sequence[Sequence[tuple[Item, int]]], token_texts: Sequence[str]
) -> None:
    """Refuse a token after a character, where one token could be both.

    In `"a" !<[5]>` llama.cpp allows the token `ab`, because `a` fits and its id is not 5.  When it
    is told that `ab` was sampled, it finds no `b` and ends the process.
    """
    names = "\0".join(token_texts)
    in_names = 0
    for character in "".join(text[:-1] for text in token_texts):
        in_names |= mask_of(ord(character))
    for item, mask in (pair for pairs in follows for pair in pairs):
        if item.rule is not None or item.first >= NAMED_TOKEN:
            continue
        if item.literal is None:
            unsafe = bool(item.first & in_names)
        else:
            unsafe = "<" in item.literal or item.literal in names
        if mask & OTHER_TOKEN or (mask & NAMED_TOKEN and unsafe):
            limit = "no token after a character that could be part of it (write !<token>* instead)"
            raise GrammarFault(item.at, limit)


def _check_products(
    rules: Sequence[Rule],
    first: Sequence[int],
    follows: Sequence[Sequence[tuple[Item, int]]],
) -> None:
    """Refuse nested counts that an output leaves open: each combination of them is a stack.

    Of `("a"{1,100}){1,100}` nobody can say how far both counts are.  A `"x"{1,100}` that something
    else than x must follow is over when it is, however many enclose it.
    """
    product = [1] * len(rules)
    graph = [[item.rule for item in rule.items() if item.rule is not None] for rule in rules]
    for component in components(graph):
        inside = set(component)
        for index in component:
            for item, mask in follows[index]:
                # A rule within itself counts once: how deep it goes is up to the output.
                nested = item.rule is not None and item.rule not in inside
                count = product[item.rule] if nested and item.rule is not None else 1
                start = item.first if item.rule is None else first[item.rule]
                times = max(item.low, 1) if item.high is None else max(item.high, 1)
                is_open = item.low != item.high and item.high is not None
                if count > 1 or (is_open and _overlap(start, mask)):
                    count *= times
                if count > MAX_REPETITION_PRODUCT:
                    limit = (
                        f"nested repetitions that multiply to at most {MAX_REPETITION_PRODUCT}, "
                        "or that end where something else must begin"
                    )
                    raise GrammarFault(item.at, limit)
                product[index] = max(product[index], count)


def _overlap(one: int, other: int) -> bool:
    """Whether something can begin both: a token may begin with any character."""
    has_token = (one | other) >= NAMED_TOKEN
    return bool(one and other) if has_token else bool(one & other)


def mask_of(low: int, high: int | None = None) -> int:
    """The set of the characters from `low` to `high`; NUL is in no text."""
    high = low if high is None else high
    mask = NON_ASCII if high > 127 and low <= MAX_CODE_POINT else 0
    if low < 128:
        mask |= (1 << min(high + 1, 128)) - (1 << low)
    return mask & ~1
