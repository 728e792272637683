"""`torchneuron env`: the environment variables."""

from __future__ import annotations

import argparse
import os

from torchneuron import env
from torchneuron.cli._table import table

_DOCUMENT = f"""# Environment variables

Written by `make docs` from `torchneuron/env.py`, the table that the code reads. They are read once, when the device is
registered (at the end of `import torch`); those of NKI kernels (`NKI_*`, `NEURON_PLATFORM_TARGET_OVERRIDE`,
`TORCH_NEURON_MX_SCALE`, `TORCH_NEURON_NKI_SPILL`) at each launch. A value that cannot be read is an error that names
the variable.

{env.markdown()}"""


def main(arguments: list[str]) -> int:
    """Prints the variables, their values and what they do."""
    parser = argparse.ArgumentParser("torchneuron env", description="The environment variables, and what is set now.")
    parser.add_argument("--markdown", action="store_true", help="print docs/environment.md")
    if parser.parse_args(arguments).markdown:
        print(_DOCUMENT, end="")
        return 0
    rows = [(v.name, os.environ.get(v.name, "-"), v.doc.replace("`", "")) for v in env.VARIABLES]
    print(table(("variable", "value", "meaning"), rows))
    return 0
