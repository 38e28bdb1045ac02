"""A comparison for programs, in the shape that docs/lineage.md describes."""

from typing import Any

from pipelines.lineage.compare import Comparison, Pair
from pipelines.lineage.target import Target


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The whole comparison."""
    return {
        "equal": comparison.equal,
        "broken_promise": comparison.broken,
        "old": _target_json(comparison.old),
        "new": _target_json(comparison.new),
        "root_causes": [
            {"cause": root.kind.value, **vars(root.change), "stages": list(root.stages)}
            for root in comparison.roots
        ],
        "pairs": [_pair_json(pair) for pair in comparison.pairs],
    }


def _target_json(target: Target) -> dict[str, Any]:
    stage_run = target.stage_run
    return {
        **target.as_json(),
        "id": stage_run.id if stage_run else None,
        "commit": stage_run.commit if stage_run else None,
    }


def _pair_json(pair: Pair) -> dict[str, Any]:
    return {
        "id": pair.id,
        "old": pair.old.stage,
        "new": pair.new.stage,
        "params": [vars(change) for change in pair.params],
        "inputs": [
            {
                "input": change.role,
                "old": vars(change.old) if change.old else None,
                "new": vars(change.new) if change.new else None,
                "made_by": change.pair,
            }
            for change in pair.inputs
        ],
        "code": None if pair.code is None else [vars(change) for change in pair.code],
        "environment": [vars(change) for change in pair.environment],
        "information": [vars(change) for change in pair.information],
        "outs": [vars(change) for change in pair.outs],
        "causes": [{"cause": cause.kind.value, **vars(cause.change)} for cause in pair.causes],
    }
