"""The exact rows that a stage learnt from: prompts, responses, rewards, advantages.

`experience` of a policy update lists the samples that the update used; what they are is in its
rollouts and scores. `online` has all three as outputs, with the step that each row is of. Policies
made before updates wrote it have the rollouts alone: then every
sampled row is shown, without advantages, and a note says so. The data of SFT, reward models and
preference runs are used whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.lineage.content import Content
from pipelines.lineage.evidence import Artifact
from pipelines.lineage.making import Making
from pipelines.lineage.naming import role_of

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
"""Of a row, in order; None where the stage has nothing of the kind."""
_REWARD_DATA = {"regression": "feedback", "process": "steps"}


@dataclass(frozen=True)
class Rows:
    """The rows of one making, sorted by (prompt, step, sample, role)."""

    making: Making
    rows: Sequence[Row]
    files: Sequence[Artifact]
    """What they were read from."""
    notes: list[str] = field(default_factory=list)


def rows_of(content: Content, making: Making) -> Rows:
    """The rows that a making learnt from, or that it made, if it is a rollout or a score."""
    known = _STAGES.get(making.name)
    if known is None:
        raise LockstepError(
            f"{making.stage} learns from no rows: --rows is for {', '.join(_STAGES)}, or for what "
            "they make"
        )
    return known(content, making)


def _rollouts(content: Content, making: Making, rollouts: Artifact) -> list[Row]:
    """Sampled rows, with the DVC hash of the policy that sampled them where it is an artifact.

    In the file is a digest of the weights, which no record knows. The first rows are of the policy
    that their maker read; `online` goes on with policies that it never writes.
    """
    makers = [making] if rollouts.path in making.outs else content.evidence.makers(rollouts)
    policy = _input(makers[0], "policy") if makers else None
    rows: list[Row] = content.rows(rollouts)
    first = min(rows, key=lambda row: row.get("step") or 0, default={}).get("policy_hash")
    known = {first: policy.hash} if policy else {}
    return [{**row, "policy_hash": known.get(row["policy_hash"])} for row in rows]


def training_file(making: Making) -> Artifact | None:
    """The file with the prompts of every row it learnt from; None: it does not learn."""
    if making.name in ("policy_update", "online"):
        found = _out(making, "experience") or _input(making, "rollouts")
        return found
    if making.name == "sft":
        return _input(making, "demonstrations")
    if making.name == "reward_model":
        return _input(making, _reward_data(making))
    if making.name == "preference":
        return _input(making, _preference_data(making))
    return None


def _policy_update(content: Content, making: Making) -> Rows:
    find = _need_out if making.name == "online" else _need
    rollouts, scores = find(making, "rollouts"), find(making, "scores")
    sampled = {_place(row): row for row in _rollouts(content, making, rollouts)}
    scored = {_place(row): row for row in content.rows(scores)}
    experience, notes = _out(making, "experience"), []
    if experience is None:
        notes.append(
            f"{making.stage} was made before updates recorded which rows they used: these are all "
            "that were sampled for it, and their advantages are not known"
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
        making.params.get("policy_update.chosen") == "demonstrations"
        and making.params.get("rl.algorithm") == "dpo"
    ):
        shown = {row["prompt_id"] for row in rows}
        demonstrations = _need(making, "demonstrations")
        files.append(demonstrations)
        rows += [
            _row(row, role="chosen", response=row["completion"])
            for row in content.rows(demonstrations)
            if row["prompt_id"] in shown
        ]
    return _sorted(making, rows, files, notes)


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


def _rollout(content: Content, making: Making) -> Rows:
    rollouts = _need_out(making, "rollouts")
    rows = [_sample(row, row, {}) for row in _rollouts(content, making, rollouts)]
    return _sorted(making, rows, [rollouts])


def _score(content: Content, making: Making) -> Rows:
    rollouts, scores = _need(making, "rollouts"), _need_out(making, "scores")
    sampled = {_place(row): row for row in _rollouts(content, making, rollouts)}
    rows = [_sample(row, sampled.get(_place(row), {}), row) for row in content.rows(scores)]
    return _sorted(making, rows, [rollouts, scores])


def _sft(content: Content, making: Making) -> Rows:
    demonstrations = _need(making, "demonstrations")
    rows = [
        _row(row, role="imitated", response=row["completion"])
        for row in content.rows(demonstrations)
    ]
    return _sorted(making, rows, [demonstrations])


def _reward_model(content: Content, making: Making) -> Rows:
    return _data(content, making, _reward_data(making))


def _preference(content: Content, making: Making) -> Rows:
    return _data(content, making, _preference_data(making))


def _data(content: Content, making: Making, name: str) -> Rows:
    """Pairs give two rows each; ratings and labelled steps one."""
    artifact = _need(making, name)
    rows = []
    for row in content.rows(artifact):
        if "chosen" in row:
            rows += [_row(row, role=role, response=row[role]) for role in ("chosen", "rejected")]
        else:
            rated = row.get("rating")
            rows.append(_row(row, role="rated", response=row.get("completion"), reward=rated))
    return _sorted(making, rows, [artifact])


_STAGES: dict[str, Callable[[Content, Making], Rows]] = {
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
    making: Making, rows: list[Row], files: list[Artifact], notes: list[str] | None = None
) -> Rows:
    def rank(row: Row) -> tuple[str, int, int, str]:
        index = row["sample_index"]
        return (
            row["prompt_id"],
            row["step"] or 0,
            -1 if index is None else index,
            row["role"] or "",
        )

    return Rows(making, sorted(rows, key=rank), files, notes or [])


def _place(row: Row) -> tuple[str, int, int]:
    return row["prompt_id"], row.get("step") or 0, row["sample_index"]


def _reward_data(making: Making) -> str:
    return _REWARD_DATA.get(str(making.params.get("reward_model.objective")), "preferences")


def _preference_data(making: Making) -> str:
    return "feedback" if making.params.get("preference.loss") == "kto" else "preferences"


def _input(making: Making, name: str) -> Artifact | None:
    for path, digest in making.inputs.items():
        if role_of(making.stage, path, among_inputs=True) == name:
            return Artifact(path, digest)
    return None


def _out(making: Making, name: str) -> Artifact | None:
    for path, digest in making.outs.items():
        if role_of(making.stage, path, among_inputs=False) == name:
            return Artifact(path, digest)
    return None


def _need(making: Making, name: str) -> Artifact:
    found = _input(making, name)
    if found is None:
        raise LockstepError(f"{making.stage}: its record names no input `{name}`")
    return found


def _need_out(making: Making, name: str) -> Artifact:
    found = _out(making, name)
    if found is None:
        raise LockstepError(f"{making.stage}: its record names no output `{name}`")
    return found


def select(rows: Rows, prompt: str | None, limit: int | None) -> tuple[list[Row], int]:
    """The rows of one prompt, or all, up to a limit; and how many there are."""
    found = [row for row in rows.rows if prompt is None or row["prompt_id"].startswith(prompt)]
    if prompt is not None and not found:
        some = ", ".join(dict.fromkeys(row["prompt_id"] for row in rows.rows[:8]))
        raise LockstepError(
            f"{rows.making.stage} has no row of prompt {prompt!r}; it has, among others, {some}"
        )
    return found[:limit], len(found)


def as_json(rows: Rows, shown: Sequence[Row], total: int) -> dict[str, Any]:
    """The shape that docs/lineage.md describes."""
    return {
        "stage": rows.making.stage,
        "id": rows.making.id,
        "files": [vars(item) for item in rows.files],
        "total": total,
        "rows": list(shown),
        "notes": rows.notes,
    }
