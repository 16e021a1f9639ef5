"""Check the project's text for the rules that a program can check; `make check` runs it.

- A docstring begins with a verb or a noun: not with a word of `ELLIPTIC`.
- The words of `BANNED` are in no source file and on no page.
- A sentence of a docstring has at most `MAX_WORDS` words.
- A line of a page has at most `MAX_LINE` characters, outside tables, code and links.

The files that `LEFT_OUT` matches, tests among them, are not checked at all.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ELLIPTIC = frozenset(
    [
        "What",
        "Who",
        "Whose",
        "Whom",
        "Which",
        "Whether",
        "Where",
        "When",
        "While",
        "Why",
        "Those",
        "These",
        "They",
        "Them",
        "Their",
        "There",
        "Then",
        "It",
        "Its",
        "Of",
        "So",
        "That",
        "With",
        "Without",
        "As",
        "If",
        "Not",
        "No",
        "Nothing",
        "Since",
        "For",
        "From",
        "To",
        "In",
        "On",
        "By",
        "At",
        "And",
        "But",
        "Until",
        "Also",
        "Only",
        "Some",
        "Is",
        "Are",
        "Has",
        "Was",
        "Were",
        "Beside",
        "Behind",
        "After",
        "Before",
        "Between",
        "Everything",
        "Others",
        "More",
        "Most",
        "Once",
        "Than",
    ]
)
# First lines of docstrings that may begin with such a word.
EXCEPTIONS = frozenset(("No libllama was found; the message lists the places that were searched.",))
BANNED = re.compile(
    r"\b(nobody|somebody|everybody|anybody|whoever|those who|no one|everyone|anyone|someone)\b",
    re.I,
)
MAX_WORDS = 35
MAX_LINE = 100
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+")
# Files that are not checked: tests, third-party and generated files, data for models, and this file.
LEFT_OUT = re.compile(
    r"^(tests/|build/|cllm/server/page_files/vendor|CHANGELOG|tools/training_|tools/check_prose|"
    r"benchmarks/speculation|benchmarks/side_by_side/real_chats|benchmarks/results/)"
)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def faults_of_docstring(text: str) -> Iterator[str]:
    """Yield what is wrong with a docstring."""
    summary = text.split("\n")[0]
    first = re.match(r"\w+", summary)
    if re.match(r"(?:the|an?) ", summary):
        yield "begins with a small letter"
    if first and first[0] in ELLIPTIC and summary not in EXCEPTIONS:
        yield f"begins with {first[0]!r}: begin with a verb or a noun"
    for paragraph in re.split(r"\n\s*\n", text):
        if re.search(r"[|├└]", paragraph):  # a table, a tree
            continue
        # A section of parameters has a heading, and names without an indentation.
        section = re.sub(r"(?m)^.*\n-{3,}$|^\S.* : .*$", "", paragraph)
        for sentence in SENTENCE_END.split(" ".join(section.split())):
            if len(sentence.split()) > MAX_WORDS:
                yield f"a sentence has more than {MAX_WORDS} words: {sentence[:60]} …"


def long_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are too long."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        is_table = line.lstrip().startswith("|")
        if not (is_code or is_table or "](" in line) and len(line) > MAX_LINE:
            yield number, f"has {len(line)} characters, more than {MAX_LINE}"


def faults(path: str) -> Iterator[str]:
    """Yield what is wrong with a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if found := BANNED.search(line):
            yield f"{path}:{number}: {found[0]!r}: name the subject"
    if path.endswith(".py"):
        for number, docstring in docstrings(text):
            for fault in faults_of_docstring(docstring):
                yield f"{path}:{number}: {fault}"
    if path.endswith(".md"):
        for number, fault in long_lines(text):
            yield f"{path}:{number}: {fault}"


def main() -> int:
    """Print all faults; the exit code is 1 if there are any."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.js", "*.html", "*.sh", "*.toml"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = [path for path in listed.stdout.split() if not LEFT_OUT.search(path)]
    found = [fault for path in paths if (ROOT / path).exists() for fault in faults(path)]
    print("\n".join(found) or f"prose: {len(paths)} files keep the rules")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
