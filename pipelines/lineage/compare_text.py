"""A comparison as text: the conclusion, the root causes, then every stage that differs."""

from collections.abc import Sequence
from pathlib import Path

from pipelines.lineage.compare import CauseKind, Change, Comparison, Pair, RootCause
from pipelines.lineage.facts import code, value_text
from pipelines.lineage.history import commits_between
from pipelines.lineage.stage_run import short_hash
from pipelines.lineage.target import Target
from stages.reporting.markup import printable

_MOST_FILES = 12
Lines = list[tuple[str, str]]
BROKEN = (
    "BROKEN PROMISE: params, inputs, code and environment are equal, but the bytes differ. Rerun "
    "the stage with `dvc repro --force --single-item` to see which of the two it reproduces; if "
    "neither, the stage is not deterministic on that machine."
)
ENVIRONMENT = (
    "Params, inputs and code are equal: the environment is the cause. Another kind of CPU or GPU, "
    "another number of threads or other versions round differently, and the first sampled token "
    "that differs changes everything after it; that breaks no promise."
)
UNKNOWN = (
    "Params and inputs are equal, but the records of code or environment are not enough to tell "
    "why the bytes differ: the ledger of the clone that computed them, or MLflow, has more."
)
_LABELS = {CauseKind.BROKEN: "broken promise", CauseKind.KEY: "policy"}


def conclusion(comparison: Comparison) -> str:
    """One sentence."""
    if not comparison.equal:
        return "They differ."
    if comparison.roots or any(pair.inputs or pair.environment for pair in comparison.pairs):
        return "They are equal, byte for byte, but were not produced in the same way."
    return "They are equal, and were produced in the same way."


def advice(comparison: Comparison) -> list[str]:
    """Explanations for causes that are no change of params, code or data."""
    causes = {root.kind for root in comparison.roots}
    texts = {
        CauseKind.BROKEN: BROKEN,
        CauseKind.ENVIRONMENT: ENVIRONMENT,
        CauseKind.UNKNOWN: UNKNOWN,
    }
    return [text for cause, text in texts.items() if cause in causes]


def render(comparison: Comparison, root: Path) -> str:
    """The whole comparison; `root`: the clone whose commits are named."""
    lines = [_side("A", comparison.old), _side("B", comparison.new), conclusion(comparison)]
    if comparison.roots:
        lines += [
            "",
            "Root causes, A → B" if not comparison.equal else "Produced differently, A → B",
        ]
        lines += [f"  {root_line(cause)}" for cause in comparison.roots]
    lines += [line for text in advice(comparison) for line in ("", text)]
    different = pairs_with_lines(comparison, root)
    if different:
        lines += ["", "Stage by stage, in order"]
        for pair, changes in different:
            lines += [f"  {pair.title}", *(f"    {word:<7} {text}" for word, text in changes)]
    return printable("\n".join(lines))


def _side(letter: str, target: Target) -> str:
    artifact, stage_run = target.artifact, target.stage_run
    what = f"   {artifact.path} {artifact.hash}" if artifact else ""
    how = f"   made by {stage_run.stage}, {code(stage_run)}" if stage_run else "   given"
    return "\n".join(part for part in (f"{letter}  {target.text}", what, how) if part)


def root_line(root: RootCause) -> str:
    """A root cause on one line."""
    where = f"  in {', '.join(root.stages)}" if root.stages else ""
    label = _LABELS.get(root.kind, root.kind.value)
    return f"{label:<11} {_change_text(root.change, root.kind)}{where}"


def _change_text(change: Change, cause: CauseKind) -> str:
    """A change, hashes shortened."""
    if cause is CauseKind.CODE:
        return _file_text(change)
    if cause in (CauseKind.KEY, CauseKind.STAGE):
        return f"{change.old} → {change.new}"
    if cause is CauseKind.DATA or cause in (CauseKind.BROKEN, CauseKind.UNKNOWN):
        return f"{change.key} {_short(change.old)} → {_short(change.new)}"
    return f"{change.key} {_text(change.old)} → {_text(change.new)}"


def pairs_with_lines(comparison: Comparison, root: Path) -> list[tuple[Pair, Lines]]:
    """The pairs that differ, with what differs: label and text."""
    pairs = ((pair, _pair_lines(pair, root)) for pair in comparison.pairs)
    return [(pair, lines) for pair, lines in pairs if lines]


def _pair_lines(pair: Pair, root: Path) -> Lines:
    lines = [("param", _change_text(change, CauseKind.PARAM)) for change in pair.params]
    lines += [("input", text) for text in _input_texts(pair)]
    if pair.code is None and pair.old.name == pair.new.name:
        lines.append(("code", "cannot be compared: a side has no record of it"))
    lines += [("code", _file_text(change)) for change in (pair.code or ())[:_MOST_FILES]]
    if pair.code and len(pair.code) > _MOST_FILES:
        lines.append(("code", f"and {len(pair.code) - _MOST_FILES} files more"))
    lines += [("commit", line) for line in _commits(pair, root)]
    lines += [("env", _change_text(change, CauseKind.ENVIRONMENT)) for change in pair.environment]
    if lines:
        lines += [
            ("(host)", _change_text(item, CauseKind.ENVIRONMENT)) for item in pair.information
        ]
    lines += [("out", _change_text(change, CauseKind.DATA)) for change in pair.outs]
    return lines


def _input_texts(pair: Pair) -> list[str]:
    return [
        f"{change.role} {_short(change.old.hash if change.old else None)} → "
        f"{_short(change.new.hash if change.new else None)}"
        + (" (follows from the above)" if change.chosen else "")
        + ("" if change.pair or change.chosen else " (given data)")
        for change in pair.inputs
    ]


def _commits(pair: Pair, root: Path) -> Sequence[str]:
    """The commits that changed the code in between."""
    one, other = pair.old.commit, pair.new.commit
    if not pair.code or not one or not other or one == other:
        return ()
    return commits_between(root, one, other, [change.key for change in pair.code])


def _file_text(change: Change) -> str:
    if change.old is None or change.new is None:
        return f"{change.key} only in {'B' if change.old is None else 'A'}"
    return f"{change.key} changed"


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    return short_hash(value) if len(value) >= 32 and " " not in value else value


def _text(value: object) -> str:
    return "nothing" if value is None else value_text(value)
