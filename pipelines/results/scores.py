"""`lockstep scores A B`: two scorings of the same rollouts, side by side.

A scoring is named as in `lockstep lineage`, or by its iteration alone: `iter_001`, `main:iter_001`,
a hash. Scorings of different rollouts are refused: only the same responses can be compared.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.identity.spec import Artifact
from pipelines.lineage.content import Content
from pipelines.lineage.run_index import gather
from pipelines.lineage.stage_run import short_hash
from pipelines.lineage.target import Resolver, Target
from pipelines.results import agreement
from pipelines.results.agreement import Agreement, Place

SHOWN = 70
_STAGES = ("score", "online")


@dataclass(frozen=True)
class Scoring:
    """Rewards by response, and the files they come from."""

    text: str
    scores: Artifact
    rollouts: Artifact
    rewards: dict[Place, float]
    source: str | None

    @property
    def title(self) -> str:
        what = f", {self.source}" if self.source else ""
        return f"{self.text} ({short_hash(self.scores.hash)}{what})"

    def as_json(self) -> dict[str, Any]:
        return {"name": self.text, **vars(self.scores), "source": self.source}


def scores(one: str, other: str, source: str | None, limit: int, *, as_json: bool) -> int:
    """Compare, and print; returns the exit status."""
    repository = Repository.find()
    run_index = gather(repository)
    resolver = Resolver(run_index, repository.root)
    content = Content(repository, run_index)
    first, _, second = (source or "").partition(",")
    sources = (first or None, second or first or None)
    a, b = (
        _scoring(content, _find(resolver, text), wanted)
        for text, wanted in zip((one, other), sources, strict=True)
    )
    _refuse_others(a, b)
    rows = {_place(row): row for row in content.rows(a.rollouts)}
    compared = agreement.compare(a.rewards, b.rewards)
    shown = [
        _row(rows[place], a.rewards[place], b.rewards[place])
        for place in agreement.largest(a.rewards, b.rewards, limit)
    ]
    for note in run_index.notes:
        print(f"lockstep: {note}", file=sys.stderr)
    if as_json:
        answer = {
            "one": a.as_json(),
            "other": b.as_json(),
            "rollouts": vars(a.rollouts),
            "agreement": compared.as_json(),
            "largest": shown,
        }
        print(json.dumps(answer, indent=2))
    else:
        print(_render(a, b, compared, shown))
    return 0


def _find(resolver: Resolver, text: str) -> Target:
    """Resolve a name: the scores of an iteration, else as `lockstep lineage` does."""
    _, name = resolver.revision(text)
    if "@" not in name and "/" not in name:
        try:
            return resolver.find(f"{text.removesuffix(name)}scores@{name}")
        except LockstepError:
            pass
    return resolver.find(text)


def _scoring(content: Content, target: Target, source: str | None) -> Scoring:
    stage_run = target.stage_run
    if stage_run is None or stage_run.name not in _STAGES:
        what = f"was produced by {stage_run.stage}" if stage_run else "is given data"
        raise LockstepError(
            f"{target.text} {what}: name scores, such as iter_001, HEAD~1:iter_001 or "
            "artifacts/scores/iter_001.parquet"
        )
    scored = stage_run.required("scores", among_inputs=False)
    sampled = stage_run.required("rollouts", among_inputs=stage_run.name == "score")
    rewards = {}
    for row in content.rows(scored):
        by_source = dict(row.get("by_source") or [])
        if source is not None and source not in by_source:
            raise LockstepError(
                f"{target.text} has no source {source!r}; it has {', '.join(by_source)}"
            )
        rewards[_place(row)] = float(row["reward"] if source is None else by_source[source])
    return Scoring(target.text, scored, sampled, rewards, source)


def _refuse_others(one: Scoring, other: Scoring) -> None:
    if one.rollouts.hash != other.rollouts.hash:
        raise LockstepError(
            f"{one.text} and {other.text} score different rollouts "
            f"({short_hash(one.rollouts.hash)} and {short_hash(other.rollouts.hash)}): only "
            "scorings of the same responses can be compared; `lockstep lineage diff` shows why "
            "they differ"
        )
    if one.rewards.keys() != other.rewards.keys():
        raise LockstepError(f"{one.text} and {other.text} do not have the same rows")


def _place(row: dict[str, Any]) -> Place:
    """The step, where there is one, is part of the group: each step has its own policy."""
    step = row.get("step") or 0
    return (f"{row['prompt_id']}/{step}", row["sample_index"])


def _row(row: dict[str, Any], one: float, other: float) -> dict[str, Any]:
    names = ("prompt_id", "step", "sample_index", "prompt", "response")
    return {name: row[name] for name in names if name in row} | {
        "one": one,
        "other": other,
        "difference": other - one,
    }


def _render(one: Scoring, other: Scoring, agreement: Agreement, rows: list[dict[str, Any]]) -> str:
    lines = [
        f"A  {one.title}",
        f"B  {other.title}",
        f"{agreement.num_rows} responses of {one.rollouts.path} {short_hash(one.rollouts.hash)}",
        "",
        f"mean         A {agreement.mean_one:.4g}  B {agreement.mean_other:.4g}  "
        f"B - A {agreement.mean_difference:+.4g}",
        f"spread       A {agreement.std_one:.4g}  B {agreement.std_other:.4g}",
        f"correlation  Pearson {_number(agreement.pearson)}  "
        f"Spearman {_number(agreement.spearman)}",
        _pairs(agreement),
    ]
    if rows:
        lines += ["", "where they differ most:"]
    for row in rows:
        step = f", step {row['step']}" if row.get("step") else ""
        lines += [
            f"  A {row['one']:.4g}  B {row['other']:.4g}  prompt {row['prompt_id']}{step}, sample "
            f"{row['sample_index']}",
            f"    {_cut(row['prompt'])} -> {_cut(row['response'])}",
        ]
    return "\n".join(lines)


def _pairs(agreement: Agreement) -> str:
    if not agreement.num_pairs:
        return "order        no prompt has two responses"
    pairs, reversed_ = agreement.num_pairs, agreement.num_reversed
    tied = agreement.num_tied_in_one
    return (
        f"order        {reversed_} of {pairs} pairs of a prompt's responses reversed "
        f"({reversed_ / pairs:.1%}), {tied} tied in only one ({tied / pairs:.1%})"
    )


def _number(value: float | None) -> str:
    return "undefined: one is constant" if value is None else f"{value:.3f}"


def _cut(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")
