"""Dead code: nodes that nobody reads and that have no effect go. Random operators stay: they advance the generator."""

from __future__ import annotations

from torch.fx import Graph

from torchneuron.compile.passes._graph import has_effect


def run(graph: Graph) -> bool:
    changed = False
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users and not has_effect(node):
            graph.erase_node(node)
            changed = True
    return changed
