"""The given inputs of a policy: data and models that no stage produced.

A stage always depends on its folders, so that DVC sees when they change; whether it reads one
depends on its params. The same folder may be the teacher of one stage and the unused default of
another: each reader is checked by itself, and a folder that any of them read is a given input.
"""

from collections.abc import Mapping
from pathlib import PurePosixPath

from pipelines.identity.spec import Artifact
from pipelines.lineage.facts import defaults
from pipelines.lineage.stage_run import StageRun
from pipelines.lineage.tree import Tree

Switch = tuple[str, str]
"""A param, and the value with which a stage reads a folder."""

_READ_IF: Mapping[str, Mapping[str, Switch | None]] = {
    "prepare": {
        "prepare.folder": ("prepare.source", "files"),
        "model.folder": ("model.source", "folder"),
    },
    "reward_model": {"reward_model.folder": ("reward_model.start", "folder")},
    "online": {
        "score.folder": None,
        "rollout.environments": None,
        "rollout.tool_record": None,
    },
}
"""The params of a stage that name its folders; without a switch, a folder counts as read."""
_TAUGHT = ("policy_update", "online")
_READS_TEACHER: Switch = ("rl.algorithm", "distill")


def given_inputs(tree: Tree) -> tuple[Artifact, ...]:
    """All given inputs, without folders that no stage has read."""
    inputs = {
        item
        for edge in tree.edges
        if (item := tree.nodes[edge.maker].given) is not None
        and (reader := tree.nodes[edge.reader].stage_run) is not None
        and _has_read(reader, item.path)
    }
    return tuple(sorted(inputs, key=lambda item: (item.path, item.hash)))


def _has_read(reader: StageRun, path: str) -> bool:
    # dvc.lock has only the params that params.yaml names.
    values = {**defaults(), **reader.params}
    folders = _READ_IF.get(reader.name, {})
    uses = [switch for folder, switch in folders.items() if _is_same(values[folder], path)]
    if not uses and reader.name in _TAUGHT and not path.startswith("artifacts/"):
        # No param of these stages names the teacher's folder: it is the remaining one.
        uses = [_READS_TEACHER]
    return not uses or any(use is None or values[use[0]] == use[1] for use in uses)


def _is_same(folder: str, path: str) -> bool:
    return PurePosixPath(folder) == PurePosixPath(path)
