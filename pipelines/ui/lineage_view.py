"""What `lockstep lineage` says, as the Lineage page shows it: with names that lead on.

Every stage run and artifact has a `target`, a name by which its own lineage is asked for; a stage
run that read or made rows also says where those are shown.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.identity.spec import Artifact
from pipelines.lineage import prompts
from pipelines.lineage.answer import note_changes
from pipelines.lineage.compare import compare
from pipelines.lineage.compare_text import advice, conclusion, pairs_with_lines, root_line
from pipelines.lineage.content import Content
from pipelines.lineage.facts import facts
from pipelines.lineage.naming import role_of, short_name
from pipelines.lineage.prompts import AffectedModel
from pipelines.lineage.rows import training_file
from pipelines.lineage.run_index import RunIndex
from pipelines.lineage.stage_run import StageRun
from pipelines.lineage.target import PROMPT, Resolver, Target, name_of
from pipelines.lineage.tree import Direction, Node, Tree, build_tree
from pipelines.lineage.tree_text import heading
from pipelines.ui.rollout_files import RUN
from stages.reporting.markup import printable

Shown = dict[str, Any]
_OF_ROLLOUTS = ("rollout", "score", "policy_update", "online")
_COLUMNS = (
    "prompt_id",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "rating",
    "margin",
    "source",
    "line",
)


def names(run_index: RunIndex) -> list[str]:
    """What may be asked about in the workspace: policies first."""
    lock = run_index.workspace
    paths = {path for run in lock.stages.values() for path in run.outs} if lock else set[str]()
    short = {short_name(path) for path in paths if not path.startswith("metrics/")}
    stages = set(lock.stages) if lock else set[str]()
    return [*sorted(short, key=lambda name: (not name.startswith("policy@"), name)),
            *sorted(stages - short)]  # fmt: skip


def tree(
    repository: Repository, run_index: RunIndex, text: str, *, down: bool, depth: int
) -> Shown:
    """What produced a target, or what was produced from it."""
    target = Resolver(run_index, repository.root).find(text)
    note_changes(repository, run_index, target)
    built = build_tree(run_index, target, Direction.DOWN if down else Direction.UP, depth)
    shared = _shared_hashes(run_index)
    return {
        "title": target.title,
        "heading": heading(target).split("\n"),
        "root": built.root,
        "nodes": {name: _node(node, shared) for name, node in built.nodes.items()},
        "steps": {name: _steps(built, name) for name in built.nodes},
        "cut": sorted(built.cut),
        "notes": run_index.notes[:],
    }


def _node(node: Node, shared: frozenset[str]) -> Shown:
    stage_run = node.stage_run
    if stage_run is None:
        assert node.given is not None
        return {"given": True, **_artifact(node.given, shared)}
    return {"given": False, **_run(stage_run, shared), "others": node.others}


def _run(stage_run: StageRun, shared: frozenset[str]) -> Shown:
    outs = [
        _artifact(Artifact(path, digest), shared)
        | {"role": role_of(stage_run.stage, path, among_inputs=False)}
        for path, digest in stage_run.outs.items()
    ]
    return {
        "stage": stage_run.stage,
        "id": stage_run.id,
        "target": name_of(stage_run),
        "facts": [[label, printable(text)] for label, text in facts(stage_run) if label != "outs"],
        "outs": [each for each in outs if each["role"] != "metrics"],
        "rows": _rows_of(stage_run),
    }


def _rows_of(stage_run: StageRun) -> Shown | None:
    """Where its rows are shown: rollouts on the Samples page, data here."""
    if stage_run.name in _OF_ROLLOUTS:
        learns = stage_run.artifact("experience", among_inputs=False) is not None
        return {"iteration": f"{RUN}{stage_run.id}", "trained": learns}
    return {"data": stage_run.id} if training_file(stage_run) else None


def _artifact(artifact: Artifact, shared: frozenset[str]) -> Shown:
    """Its hash names it, unless the same bytes are at other paths, too."""
    target = artifact.path if artifact.hash in shared else artifact.hash
    return {"path": artifact.path, "hash": artifact.hash, "target": target}


def _shared_hashes(run_index: RunIndex) -> frozenset[str]:
    times = Counter(artifact.hash for artifact in run_index.artifacts())
    return frozenset(digest for digest, number in times.items() if number > 1)


def _steps(built: Tree, name: str) -> list[Shown]:
    """The next nodes, each once, with the artifacts that lead there."""
    labels: dict[str, list[str]] = {}
    for edge, other in built.next_to(name):
        labels.setdefault(other, []).append(built.label(edge))
    return [{"to": other, "artifacts": each} for other, each in labels.items()]


def diff(repository: Repository, run_index: RunIndex, old: str, new: str) -> Shown:
    """Why two targets differ."""
    resolver = Resolver(run_index, repository.root)
    sides = [resolver.find(text) for text in (old, new)]
    compared = compare(run_index, *sides)
    return {
        "equal": compared.equal,
        "broken": compared.broken,
        "conclusion": conclusion(compared),
        "advice": advice(compared),
        "causes": [printable(root_line(cause)) for cause in compared.roots],
        "sides": [_side(target) for target in sides],
        "pairs": [
            {
                "title": pair.title,
                "is_cause": bool(pair.causes),
                "old": name_of(pair.old),
                "new": name_of(pair.new),
                "lines": [[label, printable(text)] for label, text in lines],
            }
            for pair, lines in pairs_with_lines(compared, repository.root)
        ],
        "notes": run_index.notes[:],
    }


def _side(target: Target) -> Shown:
    return {"text": target.text, "title": target.title, "heading": heading(target).split("\n")}


def prompt(content: Content, run_index: RunIndex, text: str) -> Shown:
    """Every model that a prompt had a part in."""
    resolver = Resolver(run_index, content.repository.root)
    lock, wanted = resolver.revision(text) if f":{PROMPT}" in text else (None, text)
    found = prompts.trace(content, run_index, wanted.removeprefix(PROMPT), lock)
    return {
        "prompt_id": found.prompt_id,
        "prompt": printable(found.prompt),
        "direct": [_affected(item) for item in found.direct],
        "indirect": [_affected(item) for item in found.indirect],
        "sampled": _runs(found.sampled),
        "evaluated": _runs(found.evaluated),
        "gone": [
            {**_short(stage_run), "path": artifact.path} for stage_run, artifact in found.gone
        ],
        "notes": run_index.notes[:],
    }


def _affected(item: AffectedModel) -> Shown:
    model = item.model
    return {
        **_short(item.stage_run),
        "model": model.hash if model else None,
        "num_rows": item.rows,
        "through": list(item.through),
    }


def _runs(stage_runs: Iterable[StageRun]) -> list[Shown]:
    return [_short(stage_run) for stage_run in stage_runs]


def _short(stage_run: StageRun) -> Shown:
    return {
        "stage": stage_run.stage,
        "target": name_of(stage_run),
        "rows": _rows_of(stage_run),
        "in_workspace": stage_run.in_workspace,
    }


def data_file(content: Content, stage_run: StageRun) -> tuple[Artifact, Path]:
    """The data that a stage run was trained on."""
    artifact = training_file(stage_run)
    if artifact is None or stage_run.name in _OF_ROLLOUTS:
        raise LockstepError(f"{stage_run.stage} is not trained on rows of data")
    path = content.locate(artifact)
    if path is None:
        raise LockstepError(content.how_to_restore(artifact))
    return artifact, path


def data_rows(path: Path, start: int, size: int, prompt_id: str | None) -> Shown:
    """Some rows of a file of data."""
    from pipelines.ui.parquet_pages import columns_in, open_file, take
    from pipelines.ui.rollout_filter import Tables, Wanted, find

    file = open_file(path)
    found = find(Tables(file, None, None), Wanted(prompt=prompt_id), start, size)
    rows = take(file, _COLUMNS, found.rows)
    return {
        "columns": columns_in(file, _COLUMNS),
        "rows": [
            {"row": number} | {name: _value(value) for name, value in row.items()}
            for number, row in zip(found.rows, rows, strict=True)
        ],
        "total": int(file.metadata.num_rows),
        "next": found.next,
        "searched": found.searched,
    }


def _value(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value
