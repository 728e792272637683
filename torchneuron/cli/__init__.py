"""The command `torchneuron`."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import sys

import torchneuron

# Name -> module and what it does. The module has `main(arguments) -> exit code`, and is imported only to be run.
COMMANDS = {
    "info": ("torchneuron.cli.info", "device, build, environment; what is missing and how to get it"),
    "check": ("torchneuron.cli.check", "run a script and report what Trainium would not run, and where"),
    "explain": ("torchneuron.cli.explain", "run a script and show which lines fused into what"),
    "ops": ("torchneuron.cli.ops", "the operators that Trainium runs"),
    "env": ("torchneuron.cli.env", "the environment variables"),
    "nki": ("torchneuron.nki.cli", "run an NKI kernel step by step, or predict its time on trn1, trn2, trn3"),
    "comm-bench": ("torchneuron.distributed.bench", "time collectives, beside gloo"),
    "conformance": ("torchneuron.conformance.__main__", "run PyTorch's own operator tests on the device"),
}


def _usage() -> str:
    lines = ["usage: torchneuron COMMAND ...", "", "commands:"]
    lines += [f"  {name:<13}{text}" for name, (module, text) in COMMANDS.items() if _installed(module)]
    return "\n".join([*lines, "", "torchneuron COMMAND --help says more."])


def _installed(module: str) -> bool:
    package = module.rpartition(".")[0]
    return importlib.util.find_spec(package) is not None


def main(arguments: list[str] | None = None) -> int:
    """Runs the command that `arguments` (by default the command line's) name; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack a letter
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name == "--version":
        print(torchneuron.__version__)
        return 0
    module, _ = COMMANDS.get(name, ("", ""))
    if not module or not _installed(module):
        print(f"torchneuron: there is no command '{name}'\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(module).main(rest)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
