"""The exact rows that a stage was trained on: prompts, responses, rewards, advantages.

`experience` of a policy update lists the samples that the update used; their texts and rewards are
in its rollouts and scores. `online` has all three as outputs, with the step of each row. A policy
without `experience` has only the rollouts: then every sampled row is shown, without advantages, and
a note says so. SFT, reward models and preference runs use all rows of their data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.lineage.content import Content
from pipelines.lineage.naming import role_of
from pipelines.lineage.run_index import Artifact
from pipelines.lineage.stage_run import StageRun

Row = dict[str, Any]
COLUMNS = (
    "prompt_id",
    "step",
    "sample_index",
    "role",
    "prompt",
    "response",
    "reward",
    "by_source",
    "advantages",
    "seed",
    "policy_hash",
    "source",
)
"""Of a row, in order; None where the stage has no such value."""
_REWARD_DATA = {"regression": "feedback", "process": "steps"}


@dataclass(frozen=True)
class Rows:
    """The rows of one stage run, sorted by (prompt, step, sample, role)."""

    stage_run: StageRun
    rows: Sequence[Row]
    files: Sequence[Artifact]
    """The files they were read from."""
    notes: list[str] = field(default_factory=list)


def rows_of(content: Content, stage_run: StageRun) -> Rows:
    """The rows that a stage run was trained on; of a rollout or score, those it produced."""
    known = _STAGES.get(stage_run.name)
    if known is None:
        raise LockstepError(
            f"{stage_run.stage} is not trained on rows: --rows is for {', '.join(_STAGES)} and "
            "their outputs"
        )
    return known(content, stage_run)


def _rollouts(content: Content, stage_run: StageRun, rollouts: Artifact) -> list[Row]:
    """Sampled rows, with the DVC hash of the policy that sampled them where it is an artifact.

    The file has a digest of the weights, which is in no record. The first rows are of the policy
    that the stage read; `online` continues with policies that it never writes.
    """
    makers = [stage_run] if rollouts.path in stage_run.outs else content.run_index.makers(rollouts)
    policy = _input(makers[0], "policy") if makers else None
    rows: list[Row] = content.rows(rollouts)
    first = min(rows, key=lambda row: row.get("step") or 0, default={}).get("policy_hash")
    known = {first: policy.hash} if policy else {}
    return [{**row, "policy_hash": known.get(row["policy_hash"])} for row in rows]


def training_file(stage_run: StageRun) -> Artifact | None:
    """The file with the prompts of every row it was trained on; None: it does not train."""
    if stage_run.name in ("policy_update", "online"):
        return _out(stage_run, "experience") or _input(stage_run, "rollouts")
    if stage_run.name == "sft":
        return _input(stage_run, "demonstrations")
    if stage_run.name == "reward_model":
        return _input(stage_run, _reward_data(stage_run))
    if stage_run.name == "preference":
        return _input(stage_run, _preference_data(stage_run))
    return None


def _policy_update(content: Content, stage_run: StageRun) -> Rows:
    find = _need_out if stage_run.name == "online" else _need
    rollouts, scores = find(stage_run, "rollouts"), find(stage_run, "scores")
    sampled = {_place(row): row for row in _rollouts(content, stage_run, rollouts)}
    scored = {_place(row): row for row in content.rows(scores)}
    experience, notes = _out(stage_run, "experience"), []
    if experience is None:
        notes.append(
            f"{stage_run.stage} has no record of which rows it used: these are all that were "
            "sampled for it, without their advantages"
        )
        used: list[Row] = [
            {"prompt_id": row["prompt_id"], "sample_index": row["sample_index"], "role": None}
            for row in sampled.values()
            if not row.get("greedy")
        ]
    else:
        used = list(content.rows(experience))
    rows = [_sample(row, sampled.get(_place(row), {}), scored.get(_place(row), {})) for row in used]
    files = [item for item in (experience, rollouts, scores) if item]
    if (
        stage_run.params.get("policy_update.chosen") == "demonstrations"
        and stage_run.params.get("rl.algorithm") == "dpo"
    ):
        shown = {row["prompt_id"] for row in rows}
        demonstrations = _need(stage_run, "demonstrations")
        files.append(demonstrations)
        rows += [
            _row(row, role="chosen", response=row["completion"])
            for row in content.rows(demonstrations)
            if row["prompt_id"] in shown
        ]
    return _sorted(stage_run, rows, files, notes)


def _sample(used: Row, sampled: Row, scored: Row) -> Row:
    """A row of the experience with what was sampled and how it was scored."""
    reward = used.get("reward")
    return {
        "prompt_id": used["prompt_id"],
        "step": used.get("step"),
        "sample_index": used["sample_index"],
        "role": used.get("role"),
        "prompt": sampled.get("prompt"),
        "response": sampled.get("response"),
        "reward": scored.get("reward") if reward is None else reward,
        "by_source": dict(scored.get("by_source") or []) or None,
        "advantages": used.get("advantages"),
        "seed": sampled.get("seed"),
        "policy_hash": sampled.get("policy_hash"),
        "source": None,
    }


def _rollout(content: Content, stage_run: StageRun) -> Rows:
    rollouts = _need_out(stage_run, "rollouts")
    rows = [_sample(row, row, {}) for row in _rollouts(content, stage_run, rollouts)]
    return _sorted(stage_run, rows, [rollouts])


def _score(content: Content, stage_run: StageRun) -> Rows:
    rollouts, scores = _need(stage_run, "rollouts"), _need_out(stage_run, "scores")
    sampled = {_place(row): row for row in _rollouts(content, stage_run, rollouts)}
    rows = [_sample(row, sampled.get(_place(row), {}), row) for row in content.rows(scores)]
    return _sorted(stage_run, rows, [rollouts, scores])


def _sft(content: Content, stage_run: StageRun) -> Rows:
    demonstrations = _need(stage_run, "demonstrations")
    rows = [
        _row(row, role="imitated", response=row["completion"])
        for row in content.rows(demonstrations)
    ]
    return _sorted(stage_run, rows, [demonstrations])


def _reward_model(content: Content, stage_run: StageRun) -> Rows:
    return _data(content, stage_run, _reward_data(stage_run))


def _preference(content: Content, stage_run: StageRun) -> Rows:
    return _data(content, stage_run, _preference_data(stage_run))


def _data(content: Content, stage_run: StageRun, name: str) -> Rows:
    """Pairs give two rows each; ratings and labelled steps one."""
    artifact = _need(stage_run, name)
    rows = []
    for row in content.rows(artifact):
        if "chosen" in row:
            rows += [_row(row, role=role, response=row[role]) for role in ("chosen", "rejected")]
        else:
            rated = row.get("rating")
            rows.append(_row(row, role="rated", response=row.get("completion"), reward=rated))
    return _sorted(stage_run, rows, [artifact])


_STAGES: dict[str, Callable[[Content, StageRun], Rows]] = {
    "policy_update": _policy_update,
    "online": _policy_update,
    "sft": _sft,
    "reward_model": _reward_model,
    "preference": _preference,
    "rollout": _rollout,
    "score": _score,
}


def _row(source: Row, **values: Any) -> Row:
    given = {
        "prompt_id": source["prompt_id"],
        "prompt": source.get("prompt"),
        "source": f"{source['source']}:{source['line']}" if source.get("source") else None,
        **values,
    }
    return {column: given.get(column) for column in COLUMNS}


def _sorted(
    stage_run: StageRun, rows: list[Row], files: list[Artifact], notes: list[str] | None = None
) -> Rows:
    def rank(row: Row) -> tuple[str, int, int, str]:
        index = row["sample_index"]
        return (
            row["prompt_id"],
            row["step"] or 0,
            -1 if index is None else index,
            row["role"] or "",
        )

    return Rows(stage_run, sorted(rows, key=rank), files, notes or [])


def _place(row: Row) -> tuple[str, int, int]:
    return row["prompt_id"], row.get("step") or 0, row["sample_index"]


def _reward_data(stage_run: StageRun) -> str:
    return _REWARD_DATA.get(str(stage_run.params.get("reward_model.objective")), "preferences")


def _preference_data(stage_run: StageRun) -> str:
    return "feedback" if stage_run.params.get("preference.loss") == "kto" else "preferences"


def _input(stage_run: StageRun, name: str) -> Artifact | None:
    for path, digest in stage_run.inputs.items():
        if role_of(stage_run.stage, path, among_inputs=True) == name:
            return Artifact(path, digest)
    return None


def _out(stage_run: StageRun, name: str) -> Artifact | None:
    for path, digest in stage_run.outs.items():
        if role_of(stage_run.stage, path, among_inputs=False) == name:
            return Artifact(path, digest)
    return None


def _need(stage_run: StageRun, name: str) -> Artifact:
    artifact = _input(stage_run, name)
    if artifact is None:
        raise LockstepError(f"{stage_run.stage}: its record names no input `{name}`")
    return artifact


def _need_out(stage_run: StageRun, name: str) -> Artifact:
    artifact = _out(stage_run, name)
    if artifact is None:
        raise LockstepError(f"{stage_run.stage}: its record names no output `{name}`")
    return artifact


def select(rows: Rows, prompt: str | None, limit: int | None) -> tuple[list[Row], int]:
    """The rows of one prompt, or all, up to a limit; and how many there are."""
    selected = [row for row in rows.rows if prompt is None or row["prompt_id"].startswith(prompt)]
    if prompt is not None and not selected:
        some = ", ".join(dict.fromkeys(row["prompt_id"] for row in rows.rows[:8]))
        raise LockstepError(
            f"{rows.stage_run.stage} has no row of prompt {prompt!r}; it has, among others, {some}"
        )
    return selected[:limit], len(selected)


def as_json(rows: Rows, shown: Sequence[Row], total: int) -> dict[str, Any]:
    """The shape that docs/lineage.md describes."""
    return {
        "stage": rows.stage_run.stage,
        "id": rows.stage_run.id,
        "files": [vars(item) for item in rows.files],
        "total": total,
        "rows": list(shown),
        "notes": rows.notes,
    }
