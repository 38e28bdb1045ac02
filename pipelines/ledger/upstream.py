"""What a report on the whole run is told about the stages before it."""

from collections.abc import Mapping
from typing import Any

from stages.contracts.catalog import BoundStage, bind_all
from stages.contracts.params import Params


def upstream_graph(
    recorded: Mapping[str, Mapping[str, str]], params: Params, bound: BoundStage
) -> list[dict[str, Any]]:
    """The stage and all before it, with the hashes of their outputs.

    Nothing else may be in it, nor the stage's own hash of an earlier run: its output would depend
    on what happened to run before.
    """
    recorded = {**recorded, bound.address: {}}
    nodes = {node.address: node for node in bind_all(params)}
    maker = {
        path: node.address
        for node in nodes.values()
        for path in (*node.outs.values(), node.metrics)
    }
    graph: dict[str, dict[str, Any]] = {}
    queue = [bound.address]
    while queue:
        node = nodes[queue.pop()]
        if node.address in graph:
            continue
        deps = {
            maker[path]
            for needed in node.inputs.values()
            for path in maker
            if path == needed or path.startswith(f"{needed}/")
        }
        outs = {path: recorded.get(node.address, {}).get(path) for path in node.outs.values()}
        graph[node.address] = {"stage": node.address, "deps": sorted(deps), "outs": outs}
        queue += deps
    return [graph[address] for address in nodes if address in graph]
