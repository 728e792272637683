"""From a captured graph to what runs it.

AOTAutograd gives a functional graph of ATen operators for forward and backward, cut where recomputing is cheaper than
keeping (min-cut). Only composites that PyTorch itself decomposes are decomposed, so that a compiled graph has the
operators, and the bits, of eager code. Each operator then runs as it does in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

Compiled = Callable[..., Any]

OPTIONS: dict[str, str] = {}
MODES = ("default", None)


def _check(mode: str | None, options: dict[str, Any] | None) -> None:
    if mode not in MODES:
        raise ValueError(
            f"torch.compile(mode={mode!r}) is not known to the neuron backend: it has no CUDA graphs and nothing to "
            "tune. Leave mode out."
        )
    for name in options or {}:
        if name not in OPTIONS:
            known = ", ".join(OPTIONS) or "none"
            raise ValueError(f"torch.compile option {name!r} is not known to the neuron backend; it has {known}.")


def _run_as_captured(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    return make_boxed_func(graph.forward)


def neuron_backend(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Compiled:
    """Compiles one graph of Dynamo's for neuron tensors; graphs with CPU tensors in them run too.

    Args:
        graph: Dynamo's graph.
        inputs: fake tensors and symbolic sizes.
        mode: only "default".
        options: none yet; an unknown one raises ValueError.
    """
    _check(mode, options)
    compiler = aot_autograd(fw_compiler=_run_as_captured, partition_fn=min_cut_rematerialization_partition)
    return compiler(graph, inputs)


def _on_neuron(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    def is_neuron(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == "neuron"

    def mentions(node: torch.fx.Node) -> bool:
        device = node.kwargs.get("device")
        return device is not None and torch.device(device).type == "neuron"

    return (
        any(map(is_neuron, inputs))
        or any(map(is_neuron, (*graph.parameters(), *graph.buffers())))
        or any(is_neuron(node.meta.get("example_value")) or mentions(node) for node in graph.graph.nodes)
    )


def default_backend(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Compiled:
    """What `torch.compile` without a backend uses: neuron for graphs with neuron tensors, Inductor for all others."""
    if _on_neuron(graph, inputs):
        return neuron_backend(graph, inputs, mode=mode, options=options)
    inductor = torch._TorchCompileInductorWrapper(mode if not options else None, options, None)
    return inductor(graph, inputs)
