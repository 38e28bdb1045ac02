"""The report in short, as Markdown that reads well in a terminal of 80 to 100 columns."""

import textwrap
from collections.abc import Sequence

from stages.contracts.params import Params
from stages.evaluation.answers import Answer
from stages.reporting.comparison import BeforeAfter, choose
from stages.reporting.concerns import Concern
from stages.reporting.evidence import Evidence
from stages.reporting.family import ROOT, Family
from stages.reporting.markdown import in_cell, one_line, plain
from stages.reporting.story import Story
from stages.reporting.tables import NO_TASK
from stages.reporting.vocabulary import (
    Form,
    describe,
    pass_metrics,
    write,
    write_error,
    write_interval,
)
from stages.standard_error import error_name

PAGE = "artifacts/report/index.html"
WIDTH = 88
_NUM_SAMPLES = 3
_MOST_TASKS = 8
_COLUMNS = {
    "win_rate": "wins",
    "reward_mean": "reward",
    "kl_to_reference": "KL",
    "entropy": "entropy",
    "response_length": "length",
}


def render(
    params: Params,
    family: Family,
    evidence: Evidence,
    story: Story,
    concerns: Sequence[Concern],
    pairs: list[BeforeAfter],
) -> str:
    """Headline, what to doubt, one table, three samples, and where to look next."""
    blocks = [
        f"# {story.headline}",
        _wrap(story.lead),
        _wrap(f"{story.method}. {_reward_source(params, evidence)}"),
        *(_wrap(f"Note: {caveat}") for caveat in story.caveats),
        *map(_concern, concerns),
        _policies(family, evidence),
        *_errors(family, evidence),
        *([_tasks(family, evidence)] if evidence.tasks[family.final] else []),
        "## Before and after",
        *(_sample(pair, family.final) for pair in choose(pairs, _NUM_SAMPLES)),
        f"The whole report: {PAGE}",
    ]
    return "\n\n".join(blocks) + "\n"


def _concern(concern: Concern) -> str:
    others = f" ({concern.names})" if len(concern.policies) > 1 else ""
    sentence = f"Warning: {concern.title}{others}: {concern.last.sentence}."
    return _wrap(f"{sentence} To try: {concern.last.advice}.")


def _reward_source(params: Params, evidence: Evidence) -> str:
    if evidence.pairwise_accuracy is None:
        return ""
    share = write(evidence.pairwise_accuracy, Form.SHARE)
    return f"The {params.rl.reward.replace('_', ' ')} ranks {share} of held-out pairs right."


def _policies(family: Family, evidence: Evidence) -> str:
    columns = _columns(evidence)
    rows = [
        [
            policy,
            *(write(evidence.evaluations[policy].get(n), describe(n).format) for n in columns),
        ]
        for policy in family.policies
    ]
    return _table(["policy", *columns.values()], rows)


def _errors(family: Family, evidence: Evidence) -> list[str]:
    """How sure the table is, in a line: there is no room beside its numbers."""
    last, errors = evidence.evaluations[family.final], []
    for name in ("reward_mean", "kl_to_reference"):
        form = describe(name).format
        if error := write_error(last.get(name), last.get(error_name(name)), form):
            errors.append(f"{_COLUMNS[name]} {error}")
    if "win_rate_low" in last:
        errors.append(f"wins {write_interval(last['win_rate_low'], last['win_rate_high'])} (95%)")
    if not errors:
        return []
    return [_wrap(f"{family.final}: {', '.join(errors)}; ± is one standard error over prompts.")]


def _columns(evidence: Evidence) -> dict[str, str]:
    """Metrics and what they are called here; of pass@k the largest k."""
    known = {name for metrics in evidence.evaluations.values() for name in metrics}
    judged = {
        "accuracy": "accuracy",
        "accuracy_sampled": "sampled",
        **{name: describe(name).label.lower() for name in pass_metrics(known)[-1:]},
    }
    return {**(judged if "accuracy" in known else {}), **_COLUMNS}


def _tasks(family: Family, evidence: Evidence) -> str:
    """The largest tasks; the page has all of them."""
    before = {row["task"]: row for row in evidence.tasks[ROOT]}
    largest = sorted(
        evidence.tasks[family.final], key=lambda row: (-row["num_prompts"], row["task"] or "")
    )
    rows = [
        [
            plain(_shorten(row["task"] or NO_TASK, WIDTH // 3)),
            write(row["num_prompts"], Form.COUNT),
            write(before.get(row["task"], {}).get("accuracy"), Form.SHARE),
            write(row["accuracy"], Form.SHARE),
            write(row["win_rate"], Form.SHARE),
        ]
        for row in largest[:_MOST_TASKS]
    ]
    table = _table(["task", "prompts", ROOT, family.final, "wins"], rows)
    left = len(largest) - _MOST_TASKS
    return table if left <= 0 else f"{table}\n\n{left} more tasks are in the report."


def _table(head: list[str], rows: list[list[str]]) -> str:
    rows = [[*map(in_cell, row)] for row in rows]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in [head, rule, *rows]
    )


def _sample(pair: BeforeAfter, final: str) -> str:
    """An indented block, which Markdown shows as it is: nothing in it can be taken for markup."""
    name_width = max(len(ROOT), len(final))
    expected = _shorten(pair.before.answer or "", WIDTH // 3)
    prompt = _shorten(pair.before.prompt, WIDTH - len(expected) - 20)
    lines = [
        f"{prompt}   (expected: {expected})" if expected else prompt,
        _response(ROOT.ljust(name_width), pair.before.greedy),
        _response(final.ljust(name_width), pair.after.greedy),
    ]
    return "\n".join(f"    {line}" for line in lines)


def _response(name: str, answer: Answer) -> str:
    mark = {True: "✓", False: "✗", None: " "}[answer.correct]
    start = f"  {name}  {mark} {write(answer.reward):>7}  "
    return start + _shorten(answer.response or "(empty)", WIDTH - len(start) - 4)


def _shorten(text: str, width: int) -> str:
    line = one_line(text)
    return line if len(line) <= width else line[: width - 1] + "…"


def _wrap(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
