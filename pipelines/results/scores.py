"""`lockstep scores A B`: two scorings of the same rollouts, side by side.

A scoring is named as in `lockstep lineage`, or by its iteration alone: `iter_001`, `main:iter_001`,
a hash. Scorings of different rollouts are refused: a response that the other has not seen cannot be
scored differently.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.lineage.content import Content
from pipelines.lineage.evidence import Artifact, gather
from pipelines.lineage.history import History
from pipelines.lineage.making import Making, short_hash
from pipelines.lineage.naming import role_of
from pipelines.lineage.target import Resolver, Target
from pipelines.results import agreement
from pipelines.results.agreement import Agreement, Place

SHOWN = 70
_STAGES = ("score", "online")


@dataclass(frozen=True)
class Scoring:
    """Rewards by place, and what they are of."""

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
        return {
            "name": self.text,
            "path": self.scores.path,
            "hash": self.scores.hash,
            "source": self.source,
        }


def scores(one: str, other: str, source: str | None, limit: int, *, as_json: bool) -> int:
    """Compare, and print; returns the exit status."""
    repository = Repository.find()
    evidence = gather(repository)
    resolver = Resolver(evidence, repository.root, History(repository.root))
    content = Content(repository, evidence)
    first, _, second = (source or "").partition(",")
    sources = (first or None, second or first or None)
    found = [
        _scoring(content, _find(resolver, text), wanted)
        for text, wanted in zip((one, other), sources, strict=True)
    ]
    _refuse_others(*found)
    rows = {_place(row): row for row in content.rows(found[0].rollouts)}
    compared = agreement.compare(found[0].rewards, found[1].rewards)
    shown = [
        _row(rows[place], found[0].rewards[place], found[1].rewards[place])
        for place in agreement.largest(found[0].rewards, found[1].rewards, limit)
    ]
    for note in evidence.notes:
        print(f"lockstep: {note}", file=sys.stderr)
    if as_json:
        answer = {
            "one": found[0].as_json(),
            "other": found[1].as_json(),
            "rollouts": {"path": found[0].rollouts.path, "hash": found[0].rollouts.hash},
            "agreement": compared.as_json(),
            "largest": shown,
        }
        print(json.dumps(answer, indent=2))
    else:
        print(_render(found[0], found[1], compared, shown))
    return 0


def _find(resolver: Resolver, text: str) -> Target:
    """What a name means: the scores of an iteration, else whatever lineage takes it for."""
    _, name = resolver.revision(text)
    if "@" not in name and "/" not in name:
        try:
            return resolver.find(f"{text.removesuffix(name)}scores@{name}")
        except LockstepError:
            pass
    return resolver.find(text)


def _scoring(content: Content, target: Target, source: str | None) -> Scoring:
    making = target.making
    if making is None or making.name not in _STAGES:
        what = making.stage if making else "nothing that is known here"
        raise LockstepError(
            f"{target.text} was made by {what}: name scores, such as iter_001, HEAD~1:iter_001 or "
            "artifacts/scores/iter_001.parquet"
        )
    scored = _of(making, "scores", among_inputs=False)
    sampled = _of(making, "rollouts", among_inputs=making.name == "score")
    rewards = {}
    for row in content.rows(scored):
        by_source = dict(row.get("by_source") or [])
        if source is not None and source not in by_source:
            raise LockstepError(
                f"{target.text} has no source {source!r}; it has {', '.join(by_source)}"
            )
        rewards[_place(row)] = float(row["reward"] if source is None else by_source[source])
    return Scoring(target.text, scored, sampled, rewards, source)


def _of(making: Making, role: str, *, among_inputs: bool) -> Artifact:
    paths = making.inputs if among_inputs else making.outs
    for path, digest in paths.items():
        if role_of(making.stage, path, among_inputs=among_inputs) == role:
            return Artifact(path, digest)
    raise LockstepError(f"the record of {making.stage} names no {role}: run it again")


def _refuse_others(one: Scoring, other: Scoring) -> None:
    if one.rollouts.hash != other.rollouts.hash:
        raise LockstepError(
            f"{one.text} and {other.text} score different rollouts "
            f"({short_hash(one.rollouts.hash)} and {short_hash(other.rollouts.hash)}): only "
            "scorings of the same responses can be compared; `lockstep lineage diff` says why they "
            "differ"
        )
    if one.rewards.keys() != other.rewards.keys():
        raise LockstepError(f"{one.text} and {other.text} do not have the same rows")


def _place(row: dict[str, Any]) -> Place:
    """The step, where there is one, is part of the group: its policy is another."""
    step = row.get("step") or 0
    return (f"{row['prompt_id']}/{step}", row["sample_index"])


def _row(row: dict[str, Any], one: float, other: float) -> dict[str, Any]:
    names = ("prompt_id", "step", "sample_index", "prompt", "response")
    return {name: row[name] for name in names if name in row} | {
        "one": one,
        "other": other,
        "difference": other - one,
    }


def _render(one: Scoring, other: Scoring, said: Agreement, rows: list[dict[str, Any]]) -> str:
    lines = [
        f"A  {one.title}",
        f"B  {other.title}",
        f"{said.num_rows} responses of {one.rollouts.path} {short_hash(one.rollouts.hash)}",
        "",
        f"mean         A {said.mean_one:.4g}  B {said.mean_other:.4g}  "
        f"B - A {said.mean_difference:+.4g}",
        f"spread       A {said.std_one:.4g}  B {said.std_other:.4g}",
        f"correlation  Pearson {_number(said.pearson)}  Spearman {_number(said.spearman)}",
        _pairs(said),
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


def _pairs(said: Agreement) -> str:
    if not said.num_pairs:
        return "order        no prompt has two responses"
    return (
        f"order        {said.num_reversed} of {said.num_pairs} pairs of a prompt's responses the "
        f"other way round ({said.num_reversed / said.num_pairs:.1%}), {said.num_tied_in_one} tied "
        f"in one only ({said.num_tied_in_one / said.num_pairs:.1%})"
    )


def _number(value: float | None) -> str:
    return "none: one is the same for all" if value is None else f"{value:.3f}"


def _cut(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 3] + "...")
