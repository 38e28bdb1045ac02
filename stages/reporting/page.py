"""The page: the whole report as one HTML file, from `report.html.j2`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.contracts.params import Params
from stages.reporting import changes, charts, graph, tables, templates
from stages.reporting.comparison import BeforeAfter, accuracy_gain_error, choose, extremes
from stages.reporting.concerns import Concern
from stages.reporting.evidence import Evidence
from stages.reporting.family import ROOT, Family
from stages.reporting.story import Story
from stages.reporting.vocabulary import (
    EVALUATION,
    MISSING,
    Form,
    write,
    write_change,
    write_error,
    write_interval,
)
from stages.standard_error import error_name

_TERMS = {
    "Policy": "The language model that is being trained; each iteration makes a new one.",
    "SFT": "Supervised fine-tuning on demonstrations, which makes the policy that RL starts from.",
    "Reference": "The SFT policy, kept as it was, against which drift is measured.",
    "Iteration": "One round: sample responses, score them, update the policy.",
    "±": "One standard error over prompts: with other prompts of the same kind, the number would "
    "mostly stay within two of these. Of a difference between two policies it is that of the "
    "differences prompt by prompt.",
}


@dataclass(frozen=True)
class Card:
    """A key number."""

    label: str
    value: str
    change: str
    note: str


def render(
    params: Params,
    family: Family,
    evidence: Evidence,
    story: Story,
    concerns: Sequence[Concern],
    pairs: list[BeforeAfter],
    nodes: Sequence[Mapping[str, Any]],
) -> str:
    """The whole document."""
    shown = choose(pairs, params.report.samples)
    rose, fell = extremes(pairs, max(1, params.report.samples // 4))
    return templates.render(
        "report.html.j2",
        title=story.headline,
        story=story,
        concerns=concerns,
        root=ROOT,
        final=family.final,
        missing=MISSING,
        cards=_cards(family, evidence, pairs),
        branches=charts.legend(family),
        figures=charts.figures(family, evidence, params),
        policies=tables.policies(family, evidence),
        head_to_head=tables.head_to_head(family, evidence),
        tasks=tables.tasks(family, evidence) if evidence.tasks[family.final] else None,
        num_prompts=f"{len(pairs):,}",
        num_shown=len(shown),
        outcomes=tables.outcomes(pairs),
        by_outcome=tables.by_outcome(shown),
        extremes={"Reward rose most": rose, "Reward fell most": fell},
        training_figures=charts.training_figures(family, evidence),
        training=tables.training(family, evidence),
        prepare=tables.facts(evidence.prepare),
        sft=tables.facts(evidence.sft),
        reward=tables.facts(evidence.reward),
        reward_source="Reward model" if params.rl.reward == "reward_model" else "Reward source",
        changes=changes.from_defaults(params),
        graph=graph.draw(nodes, family) if nodes else None,
        glossary=_TERMS | {metric.label: metric.meaning for metric in EVALUATION.values()},
        shorten=tables.shorten,
        swatch=charts.swatch,
        write=write,
    )


def _cards(family: Family, evidence: Evidence, pairs: Sequence[BeforeAfter]) -> list[Card]:
    first, last = evidence.evaluations[ROOT], evidence.evaluations[family.final]
    # From the reference itself the KL starts at 0 for sure.
    errors = {
        "accuracy": accuracy_gain_error(pairs),
        "reward_mean": last.get("reward_gain_error"),
        "kl_to_reference": last.get("kl_to_reference_error"),
    }

    def moved(metric: str, note: str) -> Card:
        form = EVALUATION[metric].format
        before, after = first.get(metric), last.get(metric)
        if before is None or after is None:
            return Card(EVALUATION[metric].label, write(after, form), "", note)
        change = write_change(before, after, form)
        error = write_error(after - before, errors.get(metric), form)
        return Card(
            EVALUATION[metric].label,
            write(after, form),
            f"{change} {error}".strip(),
            f"from {write(before, form)}; {note}",
        )

    def won(metric: str, note: str) -> Card:
        low, high = last.get(f"{metric}_low"), last.get(f"{metric}_high")
        rate, error = last.get(metric), last.get(error_name(metric))
        sure = (
            f"95%: {write_interval(low, high)}"
            if low is not None
            else f"{write_error(rate, error, Form.SHARE)}; 50% is no difference".lstrip("; ")
        )
        return Card(EVALUATION[metric].label, write(rate, Form.SHARE), sure, note)

    is_judged = "accuracy" in last
    ranked = evidence.pairwise_accuracy
    return [
        *([moved("accuracy", "held-out answers that are right")] if is_judged else []),
        won("win_rate", "of greedy responses against SFT’s"),
        *([] if is_judged else [won("win_rate_sampled", "of sampled responses against SFT’s")]),
        moved("reward_mean", "mean on held-out prompts"),
        moved("kl_to_reference", "nats per token away from SFT"),
        moved("entropy", "nats per token, 0 is collapse"),
        Card(
            "Reward source",
            write(ranked, Form.SHARE),
            "of pairs ranked right",
            "no held-out pair to rank" if ranked is None else "held-out pairs; 50% is a coin toss",
        ),
    ]
