"""Fixtures of the tests of torch.compile."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_dynamo(tmp_path, monkeypatch):
    """No test sees what another compiled."""
    monkeypatch.setenv("TORCH_NEURON_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def same_bits():
    """Checks that compiled code gives eager code's bits: `same_bits(f, *arguments, **options)`; returns the result."""

    def check(f, *arguments, **options):
        options = {"fullgraph": True, **options}
        torch.manual_seed(0)
        expected = f(*arguments)
        torch.manual_seed(0)
        got = torch.compile(f, backend="neuron", **options)(*arguments)
        expected_leaves, got_leaves = (torch.utils._pytree.tree_leaves(v) for v in (expected, got))
        assert len(expected_leaves) == len(got_leaves)
        for e, g in zip(expected_leaves, got_leaves):
            if not isinstance(e, torch.Tensor):
                assert e == g and type(e) is type(g)
                continue
            assert e.device == g.device and e.dtype == g.dtype and e.shape == g.shape and e.stride() == g.stride()
            assert torch.equal(e.cpu().nan_to_num(), g.cpu().nan_to_num()), (e, g)
        return got

    return check
