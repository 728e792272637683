"""Runs cases in worker processes, so that a crash or a hang of one costs that case alone, and keeps the results."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from torchneuron import _C
from torchneuron.conformance.check import Case, Checker, Outcome

# A case that takes longer is stopped.
TIMEOUT_SECONDS = 600


def build_id() -> str:
    """Names what was tested: results of another build of torch or of the device are not used again."""
    digest = hashlib.sha256(Path(_C.__file__).read_bytes()).hexdigest()[:12]
    return f"torch-{torch.__version__.split('+')[0]}-{digest}"


def default_results() -> Path:
    """Where the results of this build are kept between runs."""
    return Path(".cache") / "conformance" / f"{build_id()}.jsonl"


def read_results(path: Path) -> dict[Case, dict[str, Any]]:
    """The last record of each case; a torn last line is skipped."""
    records: dict[Case, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                r = json.loads(line)
            except json.JSONDecodeError:
                continue
            records[Case(r["suite"], r["name"], r["dtype"], r["kind"])] = r
    return records


def _work(pipe: Connection, limit: int | None, log: str) -> None:
    """A worker: says None when it is ready, then takes cases from the pipe and sends their records back."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(1)
    checker = Checker(limit=limit)
    pipe.send(None)
    while (case := pipe.recv()) is not None:
        start = time.monotonic()
        try:
            outcome = checker.run(case)
        except Exception as error:  # of the checker itself, such as a result it does not know how to compare
            outcome = Outcome("failed", detail=f"checker: {type(error).__name__}: {error}")
        pipe.send(outcome.record(case, time.monotonic() - start))


def _groups(cases: list[Case]) -> deque[deque[Case]]:
    """Cases of one entry and data type stay together: a worker makes their samples once."""
    groups: dict[tuple[str, str, str | None], deque[Case]] = {}
    for case in cases:
        groups.setdefault((case.suite, case.name, case.dtype), deque()).append(case)
    return deque(groups.values())


class _Worker:
    def __init__(self, limit: int | None, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, limit, str(log)), daemon=True)
        self.process.start()
        theirs.close()
        self.group: deque[Case] = deque()
        self.case: Case | None = None
        self.started = 0.0

    def go_on(self, waiting: deque[deque[Case]]) -> bool:
        """Gives the worker the next case of its group, or of a waiting one; false if there is none."""
        if not self.group and waiting:
            self.group = waiting.popleft()
        self.case, self.started = self.group.popleft() if self.group else None, time.monotonic()
        self.pipe.send(self.case)
        return self.case is not None

    def ended(self, timeout: float) -> dict[str, Any] | None:
        """The record of the running case once it has one, also if the worker died or took too long."""
        assert self.case is not None
        seconds = time.monotonic() - self.started
        if self.pipe.poll():
            try:
                record = self.pipe.recv()
                self.started = time.monotonic()
                return record
            except EOFError:
                self.process.join()
                detail = f"the process ended with {self.process.exitcode}"
                return Outcome("crashed", detail=detail).record(self.case, seconds)
        if seconds > timeout:
            self.process.kill()
            self.process.join()
            return Outcome("timeout", detail=f"stopped after {timeout} s").record(self.case, seconds)
        return None


def run(cases: list[Case], results: Path, workers: int, limit: int | None, timeout: float = TIMEOUT_SECONDS) -> None:
    """Runs `cases` and appends a line of JSON for each to `results`."""
    results.parent.mkdir(parents=True, exist_ok=True)
    waiting = _groups(cases)
    team: list[_Worker] = []
    show = _progress(len(cases))
    with results.open("a", buffering=1) as out:
        while waiting or team:
            while waiting and len(team) < workers:
                team.append(_Worker(limit, results.with_suffix(".log")))
                team[-1].go_on(waiting)
            wait([w.pipe for w in team], timeout=1)
            for worker in list(team):
                record = worker.ended(timeout)
                if record is None:
                    continue
                out.write(json.dumps(record) + "\n")
                show(record)
                if record["status"] in ("crashed", "timeout"):
                    team.remove(worker)
                    if worker.group:
                        waiting.appendleft(worker.group)
                elif not worker.go_on(waiting):
                    worker.process.join()
                    team.remove(worker)
    show(None)


def _progress(total: int) -> Callable[[dict[str, Any] | None], None]:
    """A callable that shows progress: a bar on a terminal, else a line now and then; None ends it."""
    counts: Counter[str] = Counter()
    bar = None
    if sys.stderr.isatty():
        from tqdm import tqdm

        bar = tqdm(total=total, unit="case", smoothing=0.05)
    shown = time.monotonic()

    def show(record: dict[str, Any] | None) -> None:
        nonlocal shown
        if record is not None:
            counts[record["status"]] += 1
        text = " ".join(f"{k} {v}" for k, v in sorted(counts.items()))
        if bar is not None:
            bar.set_postfix_str(text, refresh=False)
            bar.update(1) if record is not None else bar.close()
        elif record is None or time.monotonic() - shown > 20:
            print(f"{sum(counts.values())}/{total} cases: {text}", flush=True)
            shown = time.monotonic()

    return show
