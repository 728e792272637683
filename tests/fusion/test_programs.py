"""A small run of the random programs; `python tests/fusion/programs.py --count 100000` is the large one."""

import re
import subprocess
import sys


def test_fusion_changes_no_bit(root):
    command = [sys.executable, root / "tests/fusion/programs.py", "--first", "1000000", "--count", "1500"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    calls = int(re.search(r"0 differ; (\d+) calls and types", result.stdout).group(1))
    assert calls > 700, "the programs do not cover what they should"
