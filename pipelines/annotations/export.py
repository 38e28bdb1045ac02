"""`lockstep annotate export`: what people prefer as a file that `prepare` reads.

One row for each pair that is no tie, in the format `preference`, prompt and responses as messages.
`provenance` says whose judgements it is made of and what made the two responses; `prepare` keeps
the file and the line of each row, which lead back to it. The same judgements give the same bytes.

Pairs of held-out prompts are a file of their own, for `held_out_preferences`: learnt from, they
would spoil what they measure.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines.annotations import store
from pipelines.annotations.outcome import Outcome, outcomes
from pipelines.base import atomic
from pipelines.base.errors import LockstepError


@dataclass(frozen=True)
class Exported:
    """What was written, and what was not."""

    file: str
    num_rows: int
    held_out: bool
    left_out: Mapping[str, int]
    """Pairs with an opinion that are not in the file, by reason."""
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {**vars(self)}


def export(root: Path, file: Path, *, held_out: bool, at_least: int) -> Exported:
    """Write the file; LockstepError where there is nothing to write."""
    if file.suffix != ".jsonl":
        raise LockstepError(
            f"{file}: the file is of JSON lines; give it a name that ends in .jsonl"
        )
    if file.resolve().is_relative_to((root / store.FOLDER).resolve()):
        raise LockstepError(
            f"{file} is among the judgements themselves: name a file of `prepare.folder`, such as "
            "data/preferences.jsonl"
        )
    if file.exists() and not _is_export(file):
        raise LockstepError(
            f"{file} exists and is no export of judgements: name another file, and both in "
            "params.yaml"
        )
    said = store.read(root)
    rows: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    others = "of prompts that are not held out" if held_out else "of held-out prompts (--held-out)"
    for outcome in outcomes(said.judgements):
        if outcome.judgements[0].origin.held_out is not held_out:
            left_out[others] += 1
        elif len(outcome.judgements) < at_least:
            left_out[f"judged by fewer than {at_least}"] += 1
        elif outcome.preferred is None:
            left_out["ties"] += 1
        else:
            rows.append(_row(outcome))
    if not rows:
        why = _listed(left_out) or "nothing is judged"
        raise LockstepError(f"no judgement makes a preference ({why}): {file} is not written")
    text = "".join(f"{json.dumps(row, sort_keys=True, ensure_ascii=False)}\n" for row in rows)
    atomic.write_text(file, text)
    return Exported(str(file), len(rows), held_out, dict(left_out), said.notes)


def _is_export(file: Path) -> bool:
    """Whether a file may be written over: it is made of judgements, as its first row says."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        first = lines.readline()
    try:
        return bool(json.loads(first)["provenance"]["judgements"])
    except (ValueError, LookupError, TypeError):
        return not first


def _row(outcome: Outcome) -> dict[str, Any]:
    assert outcome.preferred is not None
    better, worse = outcome.preferred
    shown = outcome.judgements[0]
    wins = max(outcome.votes.values())
    row: dict[str, Any] = {
        "prompt": [dict(message) for message in shown.messages],
        "chosen": [{"role": "assistant", "content": better.text}],
        "rejected": [{"role": "assistant", "content": worse.text}],
        "provenance": {
            "pair": outcome.pair,
            "origin": asdict(shown.origin),
            "annotators": sorted(judgement.annotator for judgement in outcome.judgements),
            "judgements": sorted(judgement.id for judgement in outcome.judgements),
            "notes": [judgement.note for judgement in outcome.judgements if judgement.note],
            "votes": {
                "chosen": wins,
                "rejected": outcome.votes.total() - wins - outcome.votes["tie"],
                "tie": outcome.votes["tie"],
            },
            "chosen": _made_by(asdict(better)),
            "rejected": _made_by(asdict(worse)),
        },
    }
    if shown.tools:
        row["tools"] = [dict(tool) for tool in shown.tools]
    if shown.answer is not None:
        row["answer"] = shown.answer
    return row


def _made_by(response: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in response.items() if name not in ("text", "rewards")}


def _listed(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {why}" for why, number in left_out.items())


def render(exported: Exported) -> str:
    """For people."""
    role = "held_out_preferences" if exported.held_out else "preferences"
    left = f"; left out: {_listed(exported.left_out)}" if exported.left_out else ""
    return "\n".join(
        [
            f"{exported.file}: {exported.num_rows} preferences{left}",
            f"`prepare` reads it as {role} where params.yaml names it: docs/annotation.md",
            *exported.notes,
        ]
    )
