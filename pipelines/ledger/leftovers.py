"""Outputs of policies that params.yaml no longer names."""

from pipelines.base import atomic
from pipelines.base.repository import Repository
from stages.contracts.catalog import bind_all
from stages.contracts.params import Params

_SHARED_FOLDERS = ("metrics/iterations", "metrics/evaluations", "artifacts/evaluations")
"""Folders that the report reads as a whole, where a leftover would count as a change."""


def remove_leftovers(repository: Repository, params: Params) -> list[str]:
    """DVC leaves the outputs of stages that are gone; returns the paths removed."""
    wanted = {path for node in bind_all(params) for path in (*node.outs.values(), node.metrics)}
    removed = []
    for folder in _SHARED_FOLDERS:
        for path in sorted((repository.root / folder).glob("[!.]*")):
            relative = path.relative_to(repository.root).as_posix()
            if not any(out == relative or out.startswith(f"{relative}/") for out in wanted):
                atomic.remove(path)
                removed.append(relative)
    return removed
