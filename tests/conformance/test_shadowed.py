"""Operators with a CPU kernel that the backend's keys would resolve to a composite: the checked-in list is complete.

`python tests/conformance/test_shadowed.py` writes the list anew; look at the difference before you commit it.
"""

import json
from pathlib import Path

import pytest
import torch

from torchneuron import _C

DATA = Path(__file__).with_name("shadowed_operators.json")
KEYS = {
    "PrivateUse1": "CPU",
    "SparsePrivateUse1": "SparseCPU",
    "SparseCsrPrivateUse1": "SparseCsrCPU",
    "QuantizedPrivateUse1": "QuantizedCPU",
    "NestedTensorPrivateUse1": "NestedTensorCPU",
}
COMPOSITES = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key


def listed():
    """From the C++ core, by key."""
    found = {key: [] for key in KEYS}
    for key, name in _C.shadowed_operators():
        found[key].append(name)
    return {key: sorted(names) for key, names in found.items()}


def is_view(name):
    schema = torch._C._get_schema(*name.split(".")) if "." in name else torch._C._get_schema(name, "")
    return any(r.alias_info and not r.alias_info.is_write for r in schema.returns)


def test_list_is_up_to_date():
    data = json.loads(DATA.read_text())
    version = torch.__version__.rpartition(".")[0]
    if data["torch"] != version:
        pytest.skip(f"the list is of torch {data['torch']}, this is {version}")
    assert listed() == data["operators"]


@pytest.mark.parametrize("key", KEYS)
def test_every_cpu_kernel_has_a_neuron_kernel(key):
    """Asks the dispatcher, not our own list."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::") and has_kernel(n, KEYS[key])]
    assert len(names) > 50
    without = [n for n in names if not has_kernel(n, key)]
    assert [n for n in without if key != "PrivateUse1" or not is_view(n)] == []


@pytest.mark.parametrize("key", KEYS)
def test_shadowed_operators_are_all_that_have_composites(key):
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::") and has_kernel(n, KEYS[key])]
    shadowed = {n for n in names if any(has_kernel(n, c) for c in COMPOSITES)}
    ours = set(listed()[key])
    assert {n for n in shadowed - ours if key != "PrivateUse1" or not is_view(n)} == set()
    assert all(has_kernel(n, key) for n in ours)


if __name__ == "__main__":
    version = torch.__version__.rpartition(".")[0]
    DATA.write_text(json.dumps({"torch": version, "operators": listed()}, indent=1) + "\n")
