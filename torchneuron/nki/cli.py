"""`torchneuron nki run|profile|lint kernel.py` and the generated documents: kernels from the shell."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..perf import targets
from . import dtypes
from .arrays import is_array
from .errors import NkiError
from .jit import Kernel, simulate
from .profile import Profile, profile
from .report import summary


def main(arguments: list[str]) -> int:
    """The command: parses `arguments`, runs, returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="torchneuron nki", description="run NKI kernels on the software NeuronCore and predict their time"
    )
    commands = parser.add_subparsers(required=True)
    for name, text, handler in (
        ("run", "run a kernel step by step, with all checks, on random inputs", _run),
        ("profile", "predict a kernel's time on trn1, trn2 and trn3", _profile),
    ):
        c = commands.add_parser(name, help=text, description=text)
        c.add_argument("file", type=Path, help="Python file with the kernel")
        c.add_argument("--kernel", help="name of the kernel (default: the file's only @nki.jit function)")
        c.add_argument(
            "--input", "-i", action="append", default=[], metavar="SHAPE:DTYPE",
            help="an array argument, e.g. 128x512:bfloat16, or a number (default: the file's example_inputs())",
        )  # fmt: skip
        c.add_argument("--lnc", type=int, default=1, choices=(1, 2), help="cores")
        c.set_defaults(handler=handler)
        if name == "profile":
            c.add_argument("--core", type=int, default=0, choices=(0, 1), help="which core of --lnc 2")
            c.add_argument("--target", action="append", choices=targets.NAMES, help="default: all")
            c.add_argument("--html", type=Path, help="write the timeline as a page (of the last target)")
            c.add_argument("--perfetto", type=Path, help="write the timeline as a Perfetto trace (of the last target)")
        else:
            c.add_argument("--target", default="trn3", choices=targets.NAMES)
    for name, text, handler in (
        ("isa", "print the instruction table as Markdown", _isa),
        ("fidelity", "print predictions beside published measurements as Markdown", _fidelity),
    ):
        commands.add_parser(name, help=text, description=text).set_defaults(handler=handler)
    text = "find Python that the vendor's compiler refuses in kernels; exit code 1 if there is any"
    c = commands.add_parser("lint", help=text, description=text)
    c.add_argument("files", type=Path, nargs="+", help="Python files with kernels")
    c.set_defaults(handler=_lint)
    args = parser.parse_args(arguments)
    if getattr(args, "core", 0) >= getattr(args, "lnc", 2):
        parser.error(f"--core {args.core}: the launch has one core; two with --lnc 2")
    return args.handler(args)


@contextlib.contextmanager
def _kernel_code(path: Path) -> Iterator[None]:
    """What a kernel's file raises ends the command with a traceback of its own lines."""
    try:
        yield
    except SystemExit as e:
        sys.exit(f"{path} ends the program when it is imported (SystemExit: {e.code})")
    except Exception as e:
        package = str(Path(__file__).resolve().parents[1])
        frames = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith((package, "<frozen "))]
        head = ["Traceback (most recent call last):\n"] if frames else []
        lines = [*head, *traceback.format_list(frames), *traceback.format_exception_only(e)]
        sys.exit("".join(lines).rstrip())


def _lint(args: argparse.Namespace) -> int:
    from .lint import lint

    found = []
    for file in args.files:
        try:
            found += [f"{file}:{finding}" for finding in lint(file)]
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as e:
            sys.exit(f"{file} cannot be read as Python: {e}")
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


def _isa(args: argparse.Namespace) -> int:
    from .isa_table import markdown

    print(markdown(), end="")
    return 0


def _fidelity(args: argparse.Namespace) -> int:
    from ..perf.fidelity import markdown

    print(markdown(), end="")
    return 0


def load_kernel(path: Path, name: str | None) -> tuple[Kernel, object]:
    """The kernel of a Python file, and the module. SystemExit with the reason if there is none or more than one."""
    module_name = f"nki_file_{path.stem}"  # not numpy, if the file is numpy.py
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or not path.is_file():
        sys.exit(f"no Python file {path}")
    try:
        compile(path.read_bytes(), path, "exec")
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as e:
        sys.exit(f"{path} cannot be read as Python: {e}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    with _kernel_code(path):
        spec.loader.exec_module(module)
    kernels = {k: v for k, v in vars(module).items() if isinstance(v, Kernel)}
    if name is None and len(set(map(id, kernels.values()))) == 1:
        return next(iter(kernels.values())), module
    if name not in kernels:
        sys.exit(f"{path} has the kernels {', '.join(kernels) or '(none)'}; choose one with --kernel")
    return kernels[name], module


def parse_input(text: str, rng: np.random.Generator) -> object:
    """`128x512:bfloat16` as a random array, `3` or `0.5` as a number."""
    if ":" not in text and "x" not in text:
        return float(text) if "." in text else int(text)
    shape, _, dtype = text.partition(":")
    sizes = tuple(int(n) for n in shape.split("x"))
    t = dtypes.dtype(dtype or "float32")
    if dtypes.is_packed(t):
        return rng.integers(0, 256, (*sizes[:-1], sizes[-1] * t.itemsize), np.uint8).view(t)
    values = rng.integers(0, 8, sizes) if dtypes.is_integer(t) else rng.standard_normal(sizes)
    return values.astype(dtypes.numpy_dtype(t))


def _parsed(text: str, rng: np.random.Generator) -> object:
    try:
        return parse_input(text, rng)
    except (TypeError, ValueError) as e:
        sys.exit(f"--input {text} is neither a number nor SHAPE:DTYPE as 128x512:bfloat16 ({e})")


def _inputs(args: argparse.Namespace, module: object) -> tuple[tuple, dict]:
    """The arguments by place and by name."""
    if args.input:
        rng = np.random.default_rng(0)
        return tuple(_parsed(i, rng) for i in args.input), {}
    example = getattr(module, "example_inputs", None)
    if not callable(example):
        sys.exit(f"give the arguments with --input, or define a function example_inputs() in {args.file}")
    with _kernel_code(args.file):
        given = example()
    if isinstance(given, dict):
        return (), given
    if is_array(given):
        return (given,), {}
    if not isinstance(given, (tuple, list)):
        sys.exit(f"example_inputs() of {args.file} returns {type(given).__name__}: it must be a tuple, list or dict")
    return tuple(given), {}


def _arrays(result: object, name: str = "") -> Iterator[tuple[str, object]]:
    """The arrays of a result and how to get each: "0" for result[0], "a, 1" for result["a"][1]."""
    if result is None:
        return
    if is_array(result):
        yield name or "0", result
        return
    for k, v in result.items() if isinstance(result, dict) else enumerate(result):
        yield from _arrays(v, f"{name}, {k}" if name else str(k))


def _run(args: argparse.Namespace) -> int:
    kernel, module = load_kernel(args.file, args.kernel)
    given, named = _inputs(args, module)
    with _kernel_code(args.file):
        result = simulate(kernel[args.lnc]).run_steps(given, named, targets.get(args.target))
    for name, r in (outputs := list(_arrays(result))):
        print(f"output {name}: shape {tuple(r.shape)}, dtype {r.dtype}\n{r}")
    if not outputs:
        print("the kernel returns nothing")
    with _kernel_code(args.file):
        _predict(args, kernel, given, named, targets.NAMES)
    return 0


def _predict(
    args: argparse.Namespace, kernel: Kernel, given: tuple, named: dict, names: Sequence[str], core: int = 0
) -> list[Profile]:
    """Prints and returns the predictions for the targets; a line for each that the kernel is not for."""
    profiles, refused = [], []
    for name in names:
        try:
            profiles.append(profile(kernel[args.lnc], target=name, core=core)(*given, **named))
        except NkiError as e:
            refused.append((name, e))
    if len(names) == len(refused) == 1:
        raise refused[0][1]
    if profiles:
        print(table(profiles))
    for p in profiles:
        print(f"{p.target}: {summary(p, p.roofline())}")
    for name, why in refused:
        print(f"{name}: {why}")
    return profiles


def _profile(args: argparse.Namespace) -> int:
    kernel, module = load_kernel(args.file, args.kernel)
    given, named = _inputs(args, module)
    with _kernel_code(args.file):
        profiles = _predict(args, kernel, given, named, args.target or targets.NAMES, args.core)
    if not profiles:
        return 1
    for path, save in ((args.html, Profile.save_html), (args.perfetto, Profile.save_perfetto)):
        if path is not None:
            try:
                save(profiles[-1], path)
            except OSError as e:
                sys.exit(f"{path} cannot be written: {e.strerror}")
            print(f"wrote {path} ({profiles[-1].target})")
    return 0


def table(profiles: list[Profile]) -> str:
    """Latency and utilisation per engine, one line per target."""
    engines = [e for e in profiles[0].engines if any(p.engines[e] > 0 for p in profiles)]
    lines = [f"{'target':8}{'latency µs':>12}" + "".join(f"{e:>9}" for e in engines)]
    lines += [f"{p.target:8}{p.latency_us:12.2f}" + "".join(f"{p.engines[e]:9.1%}" for e in engines) for p in profiles]
    return "\n".join(lines)
