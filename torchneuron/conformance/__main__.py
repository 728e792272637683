"""Command line: `python -m torchneuron.conformance`."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from torchneuron.conformance.check import Case, cases
from torchneuron.conformance.kinds import SUITES
from torchneuron.conformance.report import BAD, Verdict, markdown, read_exclusions
from torchneuron.conformance.run import TIMEOUT_SECONDS, default_results, read_results, run

REPORT = Path("docs/conformance.md")


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not 1 <= int(index) <= int(count):
        raise argparse.ArgumentTypeError(f"expected i/n with 1 <= i <= n, got {text}")
    return int(index), int(count)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser("torchneuron conformance", description=sys.modules[__package__].__doc__)
    p.add_argument("--suite", action="append", choices=list(SUITES), help="run this database only (may be repeated)")
    p.add_argument("--only", type=re.compile, help="run entries whose name matches this regular expression")
    p.add_argument("--kind", action="append", help="run this kind of use only (may be repeated)")
    p.add_argument("--dtype", action="append", help="run this data type only, e.g. float32 (may be repeated)")
    p.add_argument("--shard", type=_shard, default=(1, 1), metavar="i/n", help="run every n-th case from the i-th")
    p.add_argument("--workers", type=int, default=2, help="worker processes (default 2)")
    p.add_argument("--samples", type=int, help="at most so many samples a case (default: each kind's own)")
    p.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds after which a case is stopped")
    p.add_argument("--results", type=Path, help="file of results; cases that it holds are not run again")
    p.add_argument("--again", choices=["all", "bad"], help="run all, or those that failed, again")
    p.add_argument("--report", type=Path, help=f"file to write, also if not all was run (default {REPORT}, if all was)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs what the arguments ask for; returns 1 if something failed or an exclusion is stale."""
    args = _parser().parse_args(argv)
    everything = cases(list(SUITES))
    results = args.results or default_results()
    known = read_results(results)

    def wanted(case: Case) -> bool:
        return (
            (not args.suite or case.suite in args.suite)
            and (not args.only or bool(args.only.search(case.name)))
            and (not args.kind or case.kind in args.kind)
            and (not args.dtype or case.dtype in args.dtype)
        )

    def due(case: Case) -> bool:
        return case not in known or args.again == "all" or (args.again == "bad" and known[case]["status"] in BAD)

    selected = [c for c in everything if wanted(c)][args.shard[0] - 1 :: args.shard[1]]
    todo = [c for c in selected if due(c)]
    print(f"{len(selected)} cases, {len(selected) - len(todo)} of them done before; results in {results}", flush=True)
    run(todo, results, args.workers, args.samples, args.timeout)

    records, exclusions = read_results(results), read_exclusions()
    report = args.report or (REPORT if all(c in records for c in everything) else None)
    if report:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(markdown(Verdict(everything, records, exclusions)))
        print(f"wrote {report}")
    partial = [e for e in exclusions if any(e.matches(c) for c in selected)]
    problems = Verdict(selected, records, exclusions if len(selected) == len(everything) else partial).problems()
    for line in problems:
        print(line)
    print(f"{len(problems)} problems in {len(selected)} cases")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
