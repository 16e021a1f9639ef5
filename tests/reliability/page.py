"""Write docs/reliability.md and docs/architectures.md from the records: `python -m tests.reliability.page`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap

from tests.reliability.record import RESULTS, ROOT, Cell, Record, Table, load

PAGE = ROOT / "docs" / "reliability.md"
ARCHITECTURES = "architectures"
ARCHITECTURES_PAGE = ROOT / "docs" / "architectures.md"

# The proofs in the order of the page, with their headings.
PROOFS = {
    "fault_matrix": "Native calls that fail",
    "fault_process": "Native calls that fail in the process of an engine",
    "tier_faults": "Copies and files of the KV cache that fail",
    "hazards": "What libllama aborts on",
    "api_fuzz": "Any arguments, for the engine",
    "bindings_fuzz": "Any arguments, for the bindings",
    "damaged_models": "Damaged model files",
    "damaged_states": "Damaged states",
    "damaged_images": "Damaged files of images",
    "damaged_audio": "Damaged files of audio",
    "lifecycle": "Beginnings and ends",
    "kills": "Crashes",
    "soak": "Soak",
    "sanitizers": "Sanitizers",
    "leaks": "Leaks",
}
WIDTH = 100  # of a line, in characters
MAX_ROWS = 12  # of a table; the rows of a longer one stand in its record
INTRODUCTION = """\
# Reliability

libllama does not always return errors: it can abort, hang, or return wrong results. An exception
of C++ that reaches Python ends the process. This page shows how much of that reaches a program that
uses cllm. Each section is the result of one program. The command in the section runs the program
again, and the last line names the machine and the commit. `make test-full` runs the same programs
with smaller numbers, but without sanitizers. `.ci/run` runs as many in full as it has time for.

No check inside a process helps when the process itself ends: memory runs out inside a decode, a GPU
is lost, or a mapped file is cut short. With `process=True`, as in `cllm serve`, llama.cpp has a
process of its own. If that ends, a new one replaces it: see [server.md](server.md).

## What others can make grow
A client, a file or a neighbour can make each of these grow. Each has a bound, and a test that
reaches it.

"""
ARCHITECTURES_INTRODUCTION = """\
# Architectures

cllm loads every architecture that llama.cpp computes as a causal decoder. `make test-archs`
examines them with small random models that llama.cpp's own generator writes: requests alone and
together, shared beginnings, preemption, fork, rewind, suspend and resume, and an audit of the
KV cache, past the sliding window where there is one. Each token is scored again by an engine
that computes the whole text alone. Its log probability has to be the same but for rounding
(0.05, and 0.5 with quantized weights), with `deterministic` to the bit. The files are examined
as F32, Q8_0 and Q4_K_M, in the three [layouts](determinism.md) of the KV cache, and with
`process=True`.

A file that ends a process, or whose answers depend on the company of a request, is rejected with a
`ModelLoadError` if `preflight` is on, as in `cllm serve`.

"""
# Resources that can grow, the bound of each, and the test that reaches it.
BOUNDS = (
    ("connections", "4,096 (`--max-connections`), or what fits the limit of descriptors; the one that is idle for longest is closed for another", "tests/server/test_connections.py::test_idle_clients_take_no_stream_its_connection"),
    ("descriptors", "the limit of the system; `serve` raises its own to 65,536 if it may; an engine process that cannot start for lack of descriptors is tried again", "tests/engine/test_process.py::test_a_process_that_there_is_no_room_for_is_started_later"),
    ("headers; bodies", "32 KiB, 10 s; 4 MiB, or 64 bytes for each token of context if that is more, 30 s; 32 MiB if the model takes images or audio", "tests/server/test_limits.py"),
    ("bodies of more than 1 MiB, of open requests", "512 MiB", "tests/server/test_images.py::test_large_bodies_of_open_requests_are_limited_together"),
    ("pixels and samples: of a prompt; of open requests", "512 MiB; 1 GiB, then a request waits before it reads its files", "tests/engine/test_images.py::test_a_request_reads_its_images_when_open_requests_hold_few_pixels"),
    ("a file of an image or of audio: bytes, pixels or samples, seconds, memory of its process", "64 MiB, 33,554,432, 20 s, 1 GiB", "tests/reliability/test_damaged_media.py"),
    ("an image at an address: bytes, seconds, redirects", "20 MiB, 10 s, 3; 64 MiB, 64 addresses and 30 s for a request, 512 MiB for open ones; only of `--image-host`, only public addresses", "tests/server/test_fetching.py"),
    ("arrays and objects of a body; commas; messages", "16,384; 2,097,152; 1,024, or one for each 16 tokens of context if that is more", "tests/server/test_overflow.py"),
    ("values of the messages, of the arguments of calls and of the tools of a chat", "262,144 each", "tests/engine/chat/test_chat_template.py"),
    ("log lines that quote clients; their text", "64 of each message; 80 characters of each quotation, 8,000 of any message", "tests/test_log_once.py::test_each_thing_is_logged_once_and_not_without_end"),
    ("time of the event loop for a body", "its parts are counted before it is parsed, for several models too", "tests/server/test_bodies.py"),
    ("loaded models", "`--max-models`, memory; only a POST that can be answered loads one", "tests/server/test_several.py::test_only_a_request_that_can_be_answered_loads_a_model"),
    ("requests that wait", "`max_queue`", "tests/server/test_load.py"),
    ("memory of a model", "what is available, unless `allow_overcommit` says otherwise", "tests/engine/llama/test_room.py::test_what_does_not_fit_is_rejected_with_the_n_ctx_that_does"),
    ("compute threads", "the cores of the affinity, the quotas of cgroups", "tests/test_processors.py::test_the_least_quota_of_all_cgroups_counts"),
    ("files of the prefix cache", "`prefix_cache_dir_bytes` of the directory, whichever engine has filled it", "tests/engine/thread/test_prefix_files.py::test_a_limit_holds_for_the_directory_whoever_has_filled_it"),
    ("a file that a hub sends", "the bytes that it has announced, at most 50 GB", "tests/hub/test_download.py"),
    ("a constraint", "2 s and 512 MiB, in a process of its own", "tests/engine/constraints/test_trial.py"),
    ("a chat template", "2 s and 512 MiB, in a process of its own", "tests/engine/chat/test_chat_template.py"),
    ("Markdown of an answer, on the page", "200,000 characters, 20,000 parts, 50 levels; then it is plain text", "tests/clients/test_page.py::test_no_text_of_a_model_stops_the_page"),
)  # fmt: skip


def page(records: Iterable[Record]) -> str:
    """Return the whole page, given a record of every proof."""
    by_name = {record.name: record for record in records}
    sections = (section(title, by_name[name]) for name, title in PROOFS.items())
    rows = [(name, bound, f"`{test}`") for name, bound, test in BOUNDS]
    bounds = _table(Table(("what", "bound", "test"), rows))
    return "\n".join([INTRODUCTION + "\n".join(bounds), *sections])


def architectures_page(record: Record) -> str:
    """Return the page about architectures."""
    others, reasons = record.tables
    return ARCHITECTURES_INTRODUCTION + "\n".join([
        *_table(Table(("files", ""), [(_words(name), value) for name, value in record.figures.items()])),
        "## Files that do not work in every way", *_table(others),
        "## Reasons", *_table(reasons),
        *wrap(f"*{record.machine}; {record.commit}.*", WIDTH), "",
    ])  # fmt: skip


def _words(name: str) -> str:
    """Return the name of a figure in words."""
    return name.removeprefix("n_").removeprefix("files_").replace("_", " ")


def section(title: str, record: Record) -> str:
    """Return the section of one proof."""
    lines = [f"## {title}", "", *wrap(record.claim, WIDTH), "", "```", record.command, "```", ""]
    lines += _table(Table(("", ""), [(name, value) for name, value in record.figures.items()]))
    for table in record.tables:
        if len(table.rows) > MAX_ROWS:
            path = (RESULTS / f"{record.name}.json").relative_to(ROOT)
            lines += [f"{len(table.rows)} rows, by {table.head[0]}: [{path.name}](../{path}).", ""]
            continue
        lines += [*wrap(table.caption, WIDTH), ""] if table.caption else []
        lines += _table(table)
    lines += [*wrap(f"*{record.machine}; {record.commit}.*", WIDTH), ""]
    return "\n".join(lines)


def _table(table: Table) -> list[str]:
    def row(cells: Sequence[Cell]) -> str:
        return f"| {' | '.join(_shown(cell) for cell in cells)} |"

    return [row(table.head), row(["---"] * len(table.head)), *map(row, table.rows), ""]


def _shown(cell: Cell) -> str:
    """Return a cell as text: numbers with separators, texts with escaped "|"."""
    if isinstance(cell, float):
        return f"{cell:,.3g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else cell.replace("|", "\\|")


def saved() -> list[Record]:
    """Return all saved records."""
    return [load(path) for path in sorted(RESULTS.glob("*.json"))]


def main() -> None:
    """Write the pages."""
    PAGE.write_text(page(saved()))
    ARCHITECTURES_PAGE.write_text(architectures_page(load(RESULTS / f"{ARCHITECTURES}.json")))
    print(PAGE.relative_to(ROOT), ARCHITECTURES_PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
