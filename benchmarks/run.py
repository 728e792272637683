"""`make bench`: every benchmark, one after the other, each with its own table of ratios."""

from __future__ import annotations

import importlib
import sys

SUITES = ["device", "fusion", "costs"]


def main(names: list[str]) -> None:
    """Runs the suites named, or all."""
    for name in names or SUITES:
        print(f"== benchmarks/{name}.py", flush=True)
        importlib.import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
