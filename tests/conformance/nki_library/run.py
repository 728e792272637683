"""Runs the nki-library suite (a checkout of branch 2.29_release) on this package's simulator, resumably.

    python tests/conformance/nki_library/run.py CHECKOUT --target trn2          # every case of the frozen list
    python tests/conformance/nki_library/run.py CHECKOUT --target trn2 --shard 0/4 --results DIR
    python tests/conformance/nki_library/run.py CHECKOUT --target trn2 --again failed --only moe
    python tests/conformance/nki_library/run.py CHECKOUT --report > docs/nki-conformance.md

The frozen list cases-TARGET.txt.gz holds every case that the suite does not skip for its size; --freeze writes it anew.
Each test file runs in a process of its own with the hash seed fixed. Results are JSON lines in DIR (default
nki-library-results/), one file per target and shard: a case that has one is not run again. The suite needs packages of
its own: NEEDED below.
"""

import argparse
import collections
import gzip
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TARGETS = ("trn2", "trn3")
OUTCOMES = ("passed", "skipped", "failed")
# What the suite imports, and the package that has it.
NEEDED = {
    "pandas": "pandas", "pytest_html": "pytest-html", "pytest_metadata": "pytest-metadata", "xdist": "pytest-xdist",
    "allpairspy": "allpairspy", "boto3": "boto3", "fabric2": "fabric2", "filelock": "filelock", "plotext": "plotext",
    "aws_embedded_metrics": "aws-embedded-metrics",
}  # fmt: skip

# Failures whose cause is the suite: pattern of the case's name, part of the error, why no implementation passes.
SUITE_FAULTS = (
    (
        r"test_moe_cte_unified\.py",
        "unexpected keyword argument 'weight_dtype'",
        "the test hands `weight_dtype` (test_utils.py, end of build_moe_bwmm_mx_cte) to `moe_cte`, which has no such "
        "parameter in this release",
    ),
    (
        r"test_moe_block_kernel_model\[",
        "Validation failed for ['out']",
        "two experts tie for the last place: with the suite's inputs (seed 42) the logits of the last chosen and the first "
        "unchosen expert of a token are at most 0.0009 apart. The kernel rounds the normalised input to bfloat16 and the "
        "reference does not, which moves logits by up to 0.003: such a token, one to four of a case, goes to the other "
        "expert; the logits and all other tokens agree",
    ),
    (
        r"test_moe_block_kernel_model\[.*float8_e4m3fn_x4.*_bi-0_",
        "'NoneType' object has no attribute 'dtype'",
        "the case has no bias, and gate_up_projection_mx_shard_H.py:325 reads `gate_up_bias.dtype` all the same",
    ),
    (
        r"test_moe_block_kernel_model\[.*float4",
        "MX4 MLP Proj requires I512 tile",
        "the kernel itself refuses this intermediate size with MX weights",
    ),
    (
        r"test_moe_tkg_mx\[",
        "gate_up_projection_mx.py:285",
        "the kernel quantises rows that it wrote together with rows of the same group of 8 that it never wrote (I / 4 is no "
        "multiple of 8, and nothing clears the rest), so the scale that they share depends on what SBUF held before",
    ),
    (
        r"test_qkv_cte\.py",
        "unexpected keyword argument 'is_input_swizzled'",
        "the test hands `is_input_swizzled` to `qkv`, which has no such parameter in this release (`qkv_cte` has)",
    ),
    (
        r"test_qkv_cte\.py",
        "'module' object is not callable",
        "qkv_cte.py imports `stream_shuffle_broadcast` from `..utils`, where it is a module, and calls it",
    ),
    (
        r"test_attn_blk_model\[.*-bfloat16-2-2-",
        "weight scale for row quantization",
        "the test makes the scales of static quantisation, (128, 3) and (128, 1), for cases of row quantisation, which the "
        "kernel refuses",
    ),
    (
        r"test_attn_blk_model\[.*-bfloat16-2-2-",
        "must match the size of tensor b (3)",
        "the same scales, which the reference cannot use either",
    ),
    (
        r"test_attn_blk_model\[",
        "nc_matmul moving free size",
        "attention_block_tkg.py:1121 multiplies all of batch x heads x tokens at once, more than the 512 columns that a "
        "matmul of this generation has",
    ),
    (
        r"test_attn_blk_model\[.*_(256|512)-.*-bfloat16-1-2-",
        "several ranks: K_cache",
        "on trn3 qkv_cte (for batches beyond 128) clips what it casts to `nl.float8_e4m3` at 448 (qkv_cte.py:74), and the "
        "largest number of that type is 240: three of four elements become infinite and all of K, V and X_out NaN. The "
        "reference clips at 240",
    ),
    (
        r"test_attn_blk_model\[.*-bfloat16-1-2-",
        "Validation failed for",
        "fp8 weights by static quantisation with a fp8 cache. K is drawn with a deviation of 60 and not scaled back, so that "
        "scores have a deviation of 50 and maxima near 180, where neighbouring bfloat16 numbers differ by 1: softmax picks "
        "one position, and where two are close (178.4 and 176.9 for one) rounding decides between them. The kernel rounds "
        "the inputs of both projections to fp8, the reference only clips them; with these roundings the reference differs "
        "from itself by as much as the kernel does (cosine of X_out from 0.970, bound 0.99; V_cache by up to 64 of 240, "
        "bound 16 and 7 %). The suite notes the instability itself (test_attention_block_tkg.py:1406)",
    ),
    (
        r"13252-17-",
        "the process ended",
        "memory: the suite compares 541 million elements and more in float64 (comparators.py) with three arrays alive at "
        "once, 13 GB beside 7 GB of results and inputs; the machine has 23",
    ),
)


def environment(checkout: Path) -> dict[str, str]:
    path = [ROOT, ROOT / "shims", HERE, HERE / "shims", checkout / "src", checkout / "src/nkilib_src", checkout]
    seeds = {"NEURON_PYTHONHASHSEED": "0", "PYTHONHASHSEED": "0"}
    threads = {"OMP_NUM_THREADS": "1"}  # shards are what runs in parallel
    # Large references take twice as long where every array's pages go back to the system.
    memory = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_TOP_PAD_": str(1 << 26)}
    return threads | memory | os.environ | seeds | {"PYTHONPATH": os.pathsep.join(map(str, path))}


def pytest(checkout: Path, target: str, output: Path, *options: str) -> int:
    command = [sys.executable, "-m", "pytest", "-p", "plugin", "--test-mode", "simulation", "--platform-target", target]
    command += [
        "--force-local-cleanup",
        "--output-directory",
        str(output),
        "-q",
        "--no-header",
        "--tb=native",
        *options,
    ]
    return subprocess.run(command, cwd=checkout, env=environment(checkout), stdout=subprocess.DEVNULL).returncode


def frozen(target: str) -> list[str]:
    """Names of the cases, grouped by file."""
    if not (HERE / f"cases-{target}.txt.gz").exists():
        sys.exit(f"There is no list of cases for {target} yet: write it with --target {target} --freeze.")
    return gzip.decompress((HERE / f"cases-{target}.txt.gz").read_bytes()).decode().splitlines()


def freeze(checkout: Path, target: str) -> None:
    names: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        listed = Path(scratch) / "cases"
        for file in sorted((checkout / "test/integration").rglob("test_*.py")):
            listed.unlink(missing_ok=True)
            pytest(checkout, target, Path(scratch), "--collect-only", "--list-cases", str(listed), str(file))
            names += listed.read_text().splitlines() if listed.exists() else []
            print(f"{len(names):6} {file.name}", flush=True)
    text = "".join(f"{n}\n" for n in names).encode()
    (HERE / f"cases-{target}.txt.gz").write_bytes(gzip.compress(text, mtime=0))


def results(directory: Path, target: str) -> dict[str, dict]:
    """Each case's last result. A case that began and never ended brought its process down."""
    found: dict[str, dict] = {}
    for file in sorted(directory.glob(f"{target}*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if record.get("started"):
                record = {"case": record["case"], "outcome": "failed", "cause": "the process ended", "seconds": 0}
            found[record["case"]] = record
    return found


def run(args: argparse.Namespace) -> None:
    shard, shards = map(int, args.shard.split("/"))
    args.results.mkdir(parents=True, exist_ok=True)
    record = args.results / (f"{args.target}.jsonl" if shards == 1 else f"{args.target}-{shard}of{shards}.jsonl")
    done = {c for c, r in results(args.results, args.target).items() if r["outcome"] not in args.again}
    wanted = [c for c in frozen(args.target) if zlib.crc32(c.encode()) % shards == shard]
    wanted = [c for c in wanted if c not in done and any(o in c for o in args.only)]
    files = collections.defaultdict(list)
    for case in wanted:
        files[case.split("::")[0]].append(case)
    order = sorted(files, key=lambda f: min(i for i, o in enumerate(args.only) if o in f or o in files[f][0]))
    for file in order:
        cases = files[file]
        while cases:  # again after a crash, without what has run
            with tempfile.TemporaryDirectory() as scratch:
                chosen = Path(scratch) / "cases"
                chosen.write_text("\n".join(cases))
                begin = record.stat().st_size if record.exists() else 0
                options = ["--record", str(record), "--cases", str(chosen), "--case-timeout", str(args.timeout)]
                code = pytest(args.checkout, args.target, Path(scratch) / "output", *options, f"test/{file}")
            record.touch()
            with record.open() as f:
                f.seek(begin)
                ran = {json.loads(line)["case"] for line in f}
            left = [c for c in cases if c not in ran]
            if not ran:
                with record.open("a") as f:
                    for c in left:
                        r = {"case": c, "outcome": "failed", "cause": f"not collected (pytest: {code})", "seconds": 0}
                        f.write(json.dumps(r) + "\n")
                left = []
            cases = left
        counts = collections.Counter(results(args.results, args.target)[c]["outcome"] for c in files[file])
        print(f"{file}: " + ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o]), flush=True)


def group(case: str) -> str:
    """Directory of the suite: core/qkv, experimental/loss."""
    return "/".join(case.split("::")[0].split("/")[2:4])


def report(args: argparse.Namespace) -> None:
    """Markdown: counts by directory, causes of what failed."""
    print("# nki-library on the software NeuronCore\n")
    print(
        "Written by `tests/conformance/nki_library/run.py --report`. The suite is branch 2.29_release of nki-library in its"
    )
    print(
        "simulation mode; cases are those that it does not skip for their size, per-rank cases included. *Skipped*: by the"
    )
    print("test itself. *Not run*: no result yet.")
    for target in TARGETS:
        if not (HERE / f"cases-{target}.txt.gz").exists():
            continue
        cases, found = frozen(target), results(args.results, target)
        counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        causes: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
        for case in cases:
            result = found.get(case, {"outcome": "not run"})
            for key in (group(case), "all"):
                counts[key]["cases"] += 1
                counts[key][result["outcome"]] += 1
            if result["outcome"] == "failed":
                cause = result["cause"].strip().splitlines()[-1].replace(f"{args.checkout}/", "")
                if outputs := sorted(set(re.findall(r"'rank\d+:(\w+)'", cause))):
                    cause = f"{cause.split('[')[0]}several ranks: {', '.join(outputs)}"
                causes[group(case), cause[:160]].append(case)
        print(
            f"\n## {target}\n\n| directory | cases | passed | skipped | failed | not run |\n|---|---:|---:|---:|---:|---:|"
        )
        for name in sorted(counts, key=lambda n: (n == "all", n)):
            c = counts[name]
            print(f"| {name} | " + " | ".join(str(c[k]) for k in ("cases", *OUTCOMES, "not run")) + " |")
        if causes:
            print("\n| failed | where | last line of the error |\n|---:|---|---|")
        for (name, cause), failed in sorted(causes.items(), key=lambda x: -len(x[1])):
            print(f"| {len(failed)} | {name} | `{cause.replace('|', '/').replace('`', '')}` |")
        every = [(case, cause) for (_, cause), failed in causes.items() for case in failed]
        for name, error, why in SUITE_FAULTS:  # the first that fits
            mine = [(case, cause) for case, cause in every if re.search(name, case) and error in cause]
            every = [c for c in every if c not in mine]
            if mine:
                print(f"\n{len(mine)} of these by the suite itself (`{name}`, `{error}`): {why}.")
        if every:
            print(f"\nNot explained yet: {len(every)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=lambda p: Path(p).resolve())
    parser.add_argument("--target", choices=TARGETS, default="trn2")
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th case")
    parser.add_argument("--results", type=lambda p: Path(p).resolve(), default=Path("nki-library-results"))
    parser.add_argument("--again", nargs="*", default=[], choices=OUTCOMES, help="outcomes that are run again")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names: only these cases, in this order")
    parser.add_argument("--timeout", type=int, default=600, help="processor seconds per case")
    parser.add_argument("--freeze", action="store_true", help="write the list of cases anew, run nothing")
    parser.add_argument("--report", action="store_true", help="print the results as Markdown, run nothing")
    args = parser.parse_args()
    if args.freeze:
        freeze(args.checkout, args.target)
    elif args.report:
        report(args)
    elif missing := [package for module, package in NEEDED.items() if not importlib.util.find_spec(module)]:
        sys.exit(f"The suite needs packages that are not here: pip install {' '.join(missing)}")
    else:
        run(args)


if __name__ == "__main__":
    main()
