"""The Makefile, as far as it can be looked at without building anything."""

from __future__ import annotations

import shutil
import subprocess

import pytest


@pytest.fixture
def dry_run(root, tmp_path):
    """What make would do from a bare clone."""
    if not shutil.which("make"):
        pytest.skip("needs make: sudo apt-get install make")

    def run(*arguments: str) -> str:
        command = ["make", "--dry-run", "--no-print-directory", "-C", str(root), f"VENV={tmp_path}/venv", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return run


def installs(output: str) -> list[str]:
    return [line for line in output.splitlines() if " install " in line and "-m pip" in line]


def test_torch_is_chosen_by_one_variable(dry_run):
    chosen = "torch==9.8.7 --index-url http://localhost/none"
    lines = installs(dry_run("build", f"TORCH={chosen}"))
    assert [line for line in lines if " torch" in line] == [
        line for line in lines if line.endswith(f"install {chosen}")
    ]
    assert sum(line.endswith(chosen) for line in lines) == 1


def test_nothing_can_replace_torch(dry_run):
    """After torch, pip runs under a constraint and never in an isolated build environment."""
    lines = installs(dry_run("test"))
    after = lines[next(i for i, line in enumerate(lines) if "install torch==" in line) + 1 :]
    assert after and all("-c " in line for line in after)
    assert all("--no-build-isolation" in line for line in after if "-e " in line)


@pytest.mark.parametrize("target", ["demo", "test", "bench", "lint", "build", "sanitize", "docs", "format"])
def test_every_command_sets_itself_up(dry_run, target):
    assert "-m venv" in dry_run(target)


def test_lint_runs_in_test(dry_run):
    output = dry_run("test")
    for tool in ("ruff check", "ruff format --check", "clang-format --dry-run", "ctest", "pytest"):
        assert tool in output


def test_system_packages_never_fail(root):
    run = subprocess.run([root / "tools/system-packages"], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "")
