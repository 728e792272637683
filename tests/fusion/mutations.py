"""Breaks the rules of fusion, one at a time, and sees whether the random programs notice.

    python tests/fusion/mutations.py                     all of them, in build/mutants: needs minutes for each
    python tests/fusion/mutations.py overlap liveness    some of them

Each is one small change in the file that states the rule. It is built beside the installed package, from copied sources,
and must make some of 5,000 programs of `programs.py` differ between fusion on and off. Rules whose breach would hit the
single call just as the fused one (element order, random numbers, limits) are not here: `test_rows.py` compares the
single calls with PyTorch CPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
# An editable installation finds its own package before the path is searched: not in the processes of a copy.
SITE = """import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
"""


@dataclass(frozen=True)
class Mutation:
    """Each of `changes` has a text that stands once in `file`, and what it becomes."""

    rule: str
    file: str
    changes: dict[str, str]

    def apply(self, source: str) -> str:
        """The broken source."""
        for right, wrong in self.changes.items():
            if source.count(right) != 1:
                raise RuntimeError(f"{self.file} does not hold {right!r} once: mend the table of mutations")
            source = source.replace(right, wrong)
        return source


MUTATIONS = [
    Mutation("overlap", "overlap.cpp", {"if (period <= 0) return false;": "if (period <= 0) return true;"}),
    Mutation("borders", "lowering.cpp", {"convert(narrow(program_, v, type), type,": "convert(v, type,"}),
    Mutation(
        "signature",
        "cache.cpp",
        {"key = hash(graph, live);": "key = hash(graph, live) & 0;", "it->second.live == live": "true",
         "it->second.signature == graph.signature": "it->second.signature.size() == graph.signature.size()"},
    ),
    Mutation("placement", "schedule.cpp", {"((!same && !row) || column) && !g_": "(!same && !row && column) && !g_"}),
    Mutation("liveness", "fuser.cpp", {"if (overwritten) return false;": "return false;"}),
    Mutation("order", "window.cpp", {"if (overwritten) {": "if (true) {"}),
    Mutation("fusible", "record.cpp", {"const bool whole = !given ||": "const bool whole = true ||"}),
    Mutation("lists", "record_list.cpp", {"const bool whole = written &&": "const bool whole = true ||"}),
    Mutation(
        "rows",
        "record_rows.cpp",
        {"*inputs_[i].storage().unsafeGetStorageImpl(), false)": "*inputs_[i].storage().unsafeGetStorageImpl(), true)"},
    ),
    Mutation(
        "loops",
        "../core/loops/plan_loops.cpp",
        {"if (needs || step.kind == Step::Kind::store": "if (step.kind == Step::Kind::store"},
    ),
    Mutation("places", "graph.cpp", {"ndim == o.ndim && offset == o.offset &&": "ndim == o.ndim &&"}),
]  # fmt: skip


class Copy:
    """A copy of the sources with a build of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
        for name in filter(None, files):
            to = folder / name
            if not to.exists() or to.read_bytes() != (ROOT / name).read_bytes():
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, to)
        (folder / "sitecustomize.py").write_text(SITE)
        if not (folder / "build/build.ninja").exists():
            pybind11 = subprocess.check_output([sys.executable, "-m", "pybind11", "--cmakedir"], text=True).strip()
            settings = {"CMAKE_BUILD_TYPE": "Release", "Python_EXECUTABLE": sys.executable, "pybind11_DIR": pybind11}
            options = [f"-D{name}={value}" for name, value in settings.items()]
            self.call("cmake", "-G", "Ninja", "-S", folder, "-B", folder / "build", *options)

    @staticmethod
    def call(*command: object) -> None:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-4000:]}")

    def build(self) -> None:
        """Compiles what changed and puts the libraries beside the Python sources."""
        self.call("cmake", "--build", self.folder / "build")
        for library in self.folder.glob("build/**/*.so"):
            new = self.folder / "torchneuron" / f".{library.name}"
            shutil.copy2(library, new)
            new.replace(self.folder / "torchneuron" / library.name)

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Python with the copy's package."""
        environment = os.environ | {"PYTHONPATH": str(self.folder)}
        command = [sys.executable, *(str(a) for a in arguments)]
        return subprocess.run(command, capture_output=True, text=True, cwd=self.folder, env=environment)

    def check(self) -> None:
        """That the copy is what runs, and that it is sound before it is broken."""
        where = self.run("-c", "import torch, torchneuron._C as c; print(c.__file__)").stdout.strip()
        if Path(where).parent != self.folder / "torchneuron":
            raise RuntimeError(f"the copy runs {where}, not its own build in {self.folder}")
        if found := self.caught(250):
            raise RuntimeError(f"the copy fails before any rule is broken: {found}")

    def caught(self, programs: int, step: int = 250) -> str:
        """What gave the mutation away; empty if nothing did."""
        script = self.folder / "tests/fusion/programs.py"
        for first in range(0, programs, step):
            done = self.run(script, "--first", first, "--count", step)
            if done.returncode:
                lines = (done.stdout + done.stderr).splitlines()
                found = [line for line in lines if re.match(r"program \d+ differs|RuntimeError", line)]
                return found[0] if found else lines[-1]
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rules", nargs="*", choices=[[], *(m.rule for m in MUTATIONS)], help="which; default: all")
    parser.add_argument("--programs", type=int, default=5000, help="how many programs each may need")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/mutants", help="where copies are built")
    args = parser.parse_args()
    print(f"building the copy in {args.folder}", flush=True)
    copy = Copy(args.folder)
    copy.build()
    copy.check()
    missed = []
    for mutation in MUTATIONS:
        if args.rules and mutation.rule not in args.rules:
            continue
        path = copy.folder / "csrc/fusion" / mutation.file
        source = path.read_text()
        start = time.monotonic()
        try:
            path.write_text(mutation.apply(source))
            copy.build()
            found = copy.caught(args.programs)
        finally:
            path.write_text(source)
        print(f"{mutation.rule:10} {found or 'NOT CAUGHT'}  ({time.monotonic() - start:.0f} s)", flush=True)
        if not found:
            missed.append(mutation.rule)
    print(f"torch {torch.__version__}: {len(missed)} not caught {missed or ''}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
