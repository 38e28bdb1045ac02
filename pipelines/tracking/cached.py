"""Which stages an invocation found up to date, as far as dvc.lock tells."""

from dataclasses import dataclass
from pathlib import Path

from pipelines.base.errors import LockstepError
from pipelines.config.params import load_params
from pipelines.config.strict_yaml import load_yaml
from pipelines.dvc_repo.lock_file import read_stages
from pipelines.dvc_repo.lock_state import current_stages
from pipelines.ledger.publish import hashes_of_outs
from stages.contracts.catalog import BoundStage, bind_all


@dataclass(frozen=True)
class UpToDate:
    """A stage that was not run because its outputs are there."""

    bound: BoundStage
    outs: dict[str, str]
    """Its outputs with their hashes, without its metrics."""


def up_to_date(root: Path, unfinished: set[str]) -> list[UpToDate]:
    """Every stage of the graph that dvc.lock vouches for, in the graph's order.

    `unfinished` names stages that were tried and did not end well.
    """
    try:
        nodes = bind_all(load_params(root))
        recorded = read_stages(root)
        current = current_stages(recorded, load_yaml(root / "params.yaml"), unfinished)
    except LockstepError:
        return []
    outs = {node.address: hashes_of_outs(recorded.get(node.address, {})) for node in nodes}
    return [
        UpToDate(node, {path: outs[node.address][path] for path in node.outs.values()})
        for node in nodes
        if node.address in current and outs[node.address].keys() >= set(node.outs.values())
    ]
