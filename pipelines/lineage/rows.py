"""The exact rows that a stage was trained on: prompts, responses, rewards, advantages.

`experience` of a policy update lists the samples that the update used; their texts and rewards are
in its rollouts and scores. `online` has all three as outputs, with the step of each row. A policy
without `experience` has only the rollouts: then every sampled row is shown, without advantages, and
a note says so. SFT, reward models and preference runs use all rows of their data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.identity.spec import Artifact
from pipelines.lineage.content import Content
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
    rows = known(content, stage_run)
    return replace(rows, rows=sorted(rows.rows, key=order))


def order(row: Row) -> tuple[str, int, int, str]:
    """By prompt, step, sample and role; a row without a sample comes first."""
    index = row["sample_index"]
    return row["prompt_id"], row["step"] or 0, -1 if index is None else index, row["role"] or ""


def training_file(stage_run: StageRun) -> Artifact | None:
    """The file with the prompts of every row it was trained on; None: it does not train."""
    if stage_run.name in ("policy_update", "online"):
        return _experience(stage_run) or stage_run.artifact("rollouts", among_inputs=True)
    data = _data_name(stage_run)
    return stage_run.artifact(data, among_inputs=True) if data else None


def _data_name(stage_run: StageRun) -> str | None:
    """Which of prepare's files it is trained on; None: none of them."""
    params = stage_run.params
    if stage_run.name == "sft":
        return "demonstrations"
    if stage_run.name == "reward_model":
        return _REWARD_DATA.get(str(params.get("reward_model.objective")), "preferences")
    if stage_run.name == "preference":
        return "feedback" if params.get("preference.loss") == "kto" else "preferences"
    return None


def _experience(stage_run: StageRun) -> Artifact | None:
    return stage_run.artifact("experience", among_inputs=False)


def _policy_update(content: Content, stage_run: StageRun) -> Rows:
    is_staged = stage_run.name != "online"
    rollouts = stage_run.required("rollouts", among_inputs=is_staged)
    scores = stage_run.required("scores", among_inputs=is_staged)
    sampled = _by_place(_rollouts(content, stage_run, rollouts))
    scored = _by_place(content.rows(scores))
    experience, notes = _experience(stage_run), []
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
        used = content.rows(experience)
    rows = [_sample(row, sampled.get(_place(row), {}), scored.get(_place(row), {})) for row in used]
    files = [item for item in (experience, rollouts, scores) if item]
    params = stage_run.params
    chosen, algorithm = params.get("policy_update.chosen"), params.get("rl.algorithm")
    if chosen == "demonstrations" and algorithm == "dpo":
        shown = {row["prompt_id"] for row in rows}
        demonstrations = stage_run.required("demonstrations", among_inputs=True)
        files.append(demonstrations)
        rows += [
            _row(row, "chosen", row["completion"])
            for row in content.rows(demonstrations)
            if row["prompt_id"] in shown
        ]
    return Rows(stage_run, rows, files, notes)


def _rollout(content: Content, stage_run: StageRun) -> Rows:
    rollouts = stage_run.required("rollouts", among_inputs=False)
    rows = [_sample(row, row, {}) for row in _rollouts(content, stage_run, rollouts)]
    return Rows(stage_run, rows, [rollouts])


def _score(content: Content, stage_run: StageRun) -> Rows:
    rollouts = stage_run.required("rollouts", among_inputs=True)
    scores = stage_run.required("scores", among_inputs=False)
    sampled = _by_place(_rollouts(content, stage_run, rollouts))
    rows = [_sample(row, sampled.get(_place(row), {}), row) for row in content.rows(scores)]
    return Rows(stage_run, rows, [rollouts, scores])


def _rollouts(content: Content, stage_run: StageRun, rollouts: Artifact) -> list[Row]:
    """Sampled rows, with the DVC hash of the policy that sampled them where it is an artifact.

    The file has a digest of the weights, which is in no record. The first rows are of the policy
    that the stage read; `online` continues with policies that it never writes.
    """
    makers = [stage_run] if rollouts.path in stage_run.outs else content.run_index.makers(rollouts)
    policy = makers[0].artifact("policy", among_inputs=True) if makers else None
    rows: list[Row] = content.rows(rollouts)
    first = min(rows, key=lambda row: row.get("step") or 0, default={}).get("policy_hash")
    known = {first: policy.hash} if policy else {}
    return [{**row, "policy_hash": known.get(row["policy_hash"])} for row in rows]


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


def _by_place(rows: list[Row]) -> dict[tuple[str, int, int], Row]:
    return {_place(row): row for row in rows}


def _place(row: Row) -> tuple[str, int, int]:
    return row["prompt_id"], row.get("step") or 0, row["sample_index"]


def _data(content: Content, stage_run: StageRun) -> Rows:
    """Pairs give two rows each; demonstrations, ratings and labelled steps one."""
    artifact = stage_run.required(_data_name(stage_run) or "", among_inputs=True)
    rows = []
    for row in content.rows(artifact):
        if "chosen" in row:
            rows += [_row(row, role, row[role]) for role in ("chosen", "rejected")]
        else:
            role = "imitated" if stage_run.name == "sft" else "rated"
            rows.append(_row(row, role, row.get("completion"), row.get("rating")))
    return Rows(stage_run, rows, [artifact])


def _row(source: Row, role: str, response: str | None, reward: float | None = None) -> Row:
    """A row of the data."""
    return dict.fromkeys(COLUMNS) | {
        "prompt_id": source["prompt_id"],
        "role": role,
        "prompt": source.get("prompt"),
        "response": response,
        "reward": reward,
        "source": f"{source['source']}:{source['line']}" if source.get("source") else None,
    }


_STAGES: dict[str, Callable[[Content, StageRun], Rows]] = {
    "policy_update": _policy_update,
    "online": _policy_update,
    "sft": _data,
    "reward_model": _data,
    "preference": _data,
    "rollout": _rollout,
    "score": _score,
}


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
