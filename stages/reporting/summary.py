"""The report in short, as Markdown that reads well in a terminal of 80 to 100 columns."""

from collections.abc import Sequence

from stages.contracts.params import Params
from stages.reporting.comparison import Pair, choose
from stages.reporting.concerns import Concern
from stages.reporting.evidence import Evidence, Sample
from stages.reporting.family import ROOT, Family
from stages.reporting.markup import printable
from stages.reporting.story import Story
from stages.reporting.vocabulary import EVALUATION, Format, write

PAGE = "artifacts/report/index.html"
WIDTH = 88
_NUM_SAMPLES = 3
_COLUMNS = {
    "accuracy": "accuracy",
    "accuracy_sampled": "sampled",
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
    pairs: list[Pair],
) -> str:
    """Headline, what to doubt, one table, three samples, and where to look next."""
    blocks = [
        f"# {story.headline}",
        _wrap(story.lead),
        _wrap(f"{story.method}. {_reward_source(params, evidence)}"),
        *(_wrap(f"Note: {caveat}") for caveat in story.caveats),
        *map(_concern, concerns),
        _policies(family, evidence),
        "## Before and after",
        *(_sample(pair, family.final) for pair in choose(pairs, _NUM_SAMPLES)),
        f"The whole report: {PAGE}",
    ]
    return "\n\n".join(blocks) + "\n"


def _concern(concern: Concern) -> str:
    others = f" ({concern.names})" if len(concern.policies) > 1 else ""
    said = f"Warning: {concern.title}{others}: {concern.last.sentence}."
    return _wrap(f"{said} To try: {concern.last.advice}.")


def _reward_source(params: Params, evidence: Evidence) -> str:
    if evidence.pairwise_accuracy is None:
        return ""
    share = write(evidence.pairwise_accuracy, Format.SHARE)
    return f"The {params.rl.reward.value.replace('_', ' ')} ranks {share} of held-out pairs right."


def _policies(family: Family, evidence: Evidence) -> str:
    head = ["policy", *_COLUMNS.values()]
    rows = [
        [
            policy,
            *(write(evidence.evaluations[policy].get(n), EVALUATION[n].format) for n in _COLUMNS),
        ]
        for policy in family.policies
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in [head, rule, *rows]
    )


def _sample(pair: Pair, final: str) -> str:
    """An indented block, which Markdown shows as it is: nothing in it can be taken for markup."""
    name_width = max(len(ROOT), len(final))
    expected = _shorten(pair.before.answer, WIDTH // 3)
    prompt = _shorten(pair.before.prompt, WIDTH - len(expected) - 20)
    lines = [
        f"{prompt}   (expected: {expected})" if expected else prompt,
        _response(ROOT.ljust(name_width), pair.before),
        _response(final.ljust(name_width), pair.after),
    ]
    return "\n".join(f"    {line}" for line in lines)


def _response(name: str, sample: Sample) -> str:
    mark = "✓" if sample.correct else "✗"
    start = f"  {name}  {mark} {write(sample.reward):>7}  "
    return start + _shorten(sample.response or "(empty)", WIDTH - len(start) - 4)


def _shorten(text: str, width: int) -> str:
    line = printable(text).replace("\n", "⏎").replace("\t", " ")
    return line if len(line) <= width else line[: width - 1] + "…"


def _wrap(text: str) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
