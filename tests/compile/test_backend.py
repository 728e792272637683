"""How torch.compile finds the backend, its options and their errors, and what Dynamo knows of the device."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn


def test_no_backend_named_goes_by_the_tensors():
    f = torch.compile(lambda t: (t.sin() + 1).sum(-1))
    x = torch.randn(4, 8)
    torch.testing.assert_close(f(x.to("neuron")).cpu(), (x.sin() + 1).sum(-1))


def test_factory_in_the_graph():
    f = torch.compile(lambda n: torch.arange(n, device="neuron").float() * 2, fullgraph=True)
    assert f(5).tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"mode": "reduce-overhead"}, "neuron backend.*CUDA graphs"),
        ({"options": {"nonsense": 1}}, "'nonsense' is not known to the neuron backend; it has passes, cache"),
        ({"options": {"passes": ["views", "magic"]}}, "neuron backend has no pass 'magic'; its passes are .*views"),
        ({"options": {"passes": "views"}}, "'passes' is a list of names, not 'views'"),
        ({"options": {"cache": 1}}, "'cache' is True or False"),
    ],
)
def test_what_is_not_known_is_refused(arguments, words):
    with pytest.raises(Exception, match=words):
        torch.compile(nn.Linear(2, 2).to("neuron"), backend="neuron", **arguments)(torch.ones(1, 2, device="neuron"))


def test_streams_and_device_queries_can_be_traced():
    @torch.compile(backend="neuron")
    def f(x):
        return x * torch.neuron.device_count() + torch.neuron.current_device()

    assert f(torch.ones(2, device="neuron")).tolist() == [torch.neuron.device_count()] * 2


def test_the_log_shows_the_executable(python):
    code = """
import torch
x = torch.ones(2, 2, device="neuron")
torch.compile(lambda x, y: (x @ y).relu(), backend="neuron")(x, x + 1)
"""
    log = python("-c", code, TORCH_LOGS="+neuron").stderr
    for line in ("executable: 2 inputs", "%2 = aten::mm(%0, %1)", "aten::relu(%2)", "return %3"):
        assert line in log
    assert "executable:" not in python("-c", code).stderr
