"""Run all measurements, or some of them, and write the page of results: `make bench`.

Run it alone on the machine.  Records are written at once, so that an interruption loses no finished
measurement.  `--page-only` writes the page from the records again.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import time
from pathlib import Path

from benchmarks.side_by_side import page, peers, records
from benchmarks.side_by_side.suite import MEASUREMENTS, Options
from cllm.processors import usable_processors

RESULTS = Path(__file__).parents[1] / "results"
RECORDS, ENVIRONMENT = "records.jsonl", "environment.json"


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 minutes instead of an hour")
    parser.add_argument("--only", default="".join(MEASUREMENTS), help="letters, such as abg")
    parser.add_argument("--case", action="append", help='such as "8 clients"; may be repeated')
    parser.add_argument("--turns", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--threads", type=int, help="compute threads of every peer")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results[/quick]")
    parser.add_argument("--keep", action="store_true", help="keep records of other measurements")
    parser.add_argument("--page-only", action="store_true", help="only write the page again")
    options = parser.parse_args()
    if unknown := set(options.only) - set(MEASUREMENTS):
        parser.error(f"--only: there is no measurement {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    """Measure, save, write the page."""
    given = parse()
    started = time.perf_counter()

    def tell(line: str) -> None:
        print(f"{time.perf_counter() - started:6.0f} s  {line}", flush=True)

    found = peers.find()
    for peer, why in found.missing.items():
        if why:
            tell(f"{peer} is left out: {why}")
    where = page.environment(
        datetime.date.today().isoformat(), "quick" if given.quick else "full", found
    )
    options = Options(
        peers=found,
        n_threads=given.threads or usable_processors().n_threads,
        n_turns=given.turns or (1 if given.quick else 3),
        is_quick=given.quick,
        cases=frozenset(given.case or ()),
        tell=tell,
        where=str(where),
    )
    out = given.out or (RESULTS / "quick" if given.quick else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    path = out / RECORDS
    done = records.load(path) if (given.keep or given.page_only) and path.exists() else []
    if not given.page_only:
        for letter in given.only:
            done = [r for r in done if r.measurement != letter or not options.measures(r.case)]
            for record in MEASUREMENTS[letter](options):
                done.append(record)
                records.save(done, path)
        (out / ENVIRONMENT).write_text(json.dumps(dataclasses.asdict(where), indent=2) + "\n")
    where = page.Environment(**json.loads((out / ENVIRONMENT).read_text()))
    tell(f"wrote {page.write(done, where, out)}")


if __name__ == "__main__":
    main()
