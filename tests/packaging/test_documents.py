"""What the documents say is so."""

from __future__ import annotations

import re

import pytest

DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/errors.md",
    "docs/fusion.md",
    "docs/operators.md",
    "docs/porting.md",
]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(root, name):
    document = root / name
    for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / link).exists(), link


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_named_are_there(root, name):
    for path in re.findall(r"`((?:csrc|torchneuron|docs|tests|examples|tools)/[\w/.]+)`", (root / name).read_text()):
        assert (root / path).exists(), path


@pytest.mark.parametrize(("command", "document"), [("env", "environment"), ("ops", "operators")])
def test_generated_documents_are_current(root, python, command, document):
    run = python("-m", "torchneuron", command, "--markdown")
    assert (root / f"docs/{document}.md").read_text() == run.stdout, "run `make docs`"


def test_porting_example_runs(root, python):
    section = (root / "README.md").read_text().split("## Porting in ten lines")[1].split("\n## ")[0]
    code = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    run = python("-c", code + "\nprint(device, loss.device)")
    assert (run.stdout, run.stderr) == ("neuron neuron:0\n", "")
