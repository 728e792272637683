"""From a captured graph to what runs it.

AOTAutograd gives a functional graph of ATen operators for forward and backward, cut where recomputing is cheaper than
keeping (min-cut). Decomposed are only composites that PyTorch itself decomposes, and what can be taken apart without
changing a bit (decompositions.py), so that a compiled graph has the operators, and the bits, of eager code. Passes
simplify the graph, and lowering makes it one executable, which C++ runs without Python.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import _disable_current_modes

from torchneuron.compile import cache
from torchneuron.compile.decompositions import DECOMPOSITIONS
from torchneuron.compile.lowering import lower
from torchneuron.compile.passes import PASSES, run_passes
from torchneuron.compile.plan import Plan, render

log = logging.getLogger(__name__)
Compiled = Callable[..., Any]
MODES = ("default", None)


@dataclass(frozen=True)
class Options:
    """`torch.compile(options={...})`: docs/compile.md says what each means."""

    passes: frozenset[str] = frozenset(PASSES)
    cache: bool = True

    @staticmethod
    def read(mode: str | None, options: dict[str, Any] | None) -> Options:
        """Raises ValueError for what is not known."""
        if mode not in MODES:
            raise ValueError(
                f"torch.compile(mode={mode!r}) is not known to the neuron backend: it has no CUDA graphs and nothing "
                "to tune. Leave mode out."
            )
        given = dict(options or {})
        known = [f.name for f in fields(Options)]
        for name in given:
            if name not in known:
                raise ValueError(
                    f"torch.compile option {name!r} is not known to the neuron backend; it has {', '.join(known)}."
                )
        if isinstance(given.get("passes"), str):
            raise ValueError(f"torch.compile option 'passes' is a list of names, not {given['passes']!r}.")
        if "passes" in given:
            given["passes"] = frozenset(given["passes"])
            if unknown := sorted(given["passes"] - set(PASSES)):
                raise ValueError(
                    f"The neuron backend has no pass {', '.join(map(repr, unknown))}; its passes are "
                    f"{', '.join(PASSES)}."
                )
        if not isinstance(given.get("cache", True), bool):
            raise ValueError(f"torch.compile option 'cache' is True or False, not {given['cache']!r}.")
        return Options(**given)


def _plan(graph: torch.fx.GraphModule, options: Options) -> Plan:
    """The plan of a graph, from the cache or made now."""
    name = None
    if options.cache:
        try:
            name = cache.key(graph, options.passes)
        except cache.Unencodable as why:
            log.debug("not cached: %s", why)
        if name and (plan := cache.load(name)):
            log.debug("cache hit: %s", name)
            return plan
    run_passes(graph, options.passes)
    plan = lower(graph)
    if name:
        try:
            cache.store(name, plan)
        except cache.Unencodable as why:
            log.debug("not cached: %s", why)
    return plan


def compile_graph(graph: torch.fx.GraphModule, options: Options) -> Compiled:
    """The executable for one of AOTAutograd's graphs: takes a list of inputs, which it empties, returns a list."""
    start = time.perf_counter()
    with _disable_current_modes():  # constants are real tensors
        plan = _plan(graph, options)
        executable = plan.build()
    log.info("compiled %d nodes in %.1f ms", len(graph.graph.nodes), 1e3 * (time.perf_counter() - start))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", render(plan))
    return executable


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
        options: see `Options`; an unknown one raises ValueError.
    """
    chosen = Options.read(mode, options)
    compiler = aot_autograd(
        fw_compiler=lambda graph, inputs: compile_graph(graph, chosen),
        decompositions=DECOMPOSITIONS,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
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
