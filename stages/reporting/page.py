"""The page: the whole report as one HTML file."""

from collections.abc import Mapping, Sequence
from typing import Any

from stages.contracts.params import Params
from stages.reporting import changes, charts, graph, tables
from stages.reporting.comparison import BeforeAfter, accuracy_gain_error, choose, extremes
from stages.reporting.concerns import Concern
from stages.reporting.evidence import Evidence
from stages.reporting.family import ROOT, Family
from stages.reporting.markup import Child, Markup, document, element, join
from stages.reporting.story import Story
from stages.reporting.style import STYLE
from stages.reporting.vocabulary import (
    EVALUATION,
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
    body = join(
        _header(story, concerns, has_tasks=bool(evidence.tasks[family.final])),
        element(
            "main",
            _cards(family, evidence, pairs),
            _iterations(params, family, evidence),
            _tasks(family, evidence),
            _samples(params, family, pairs),
            _training(params, family, evidence),
            _params(params),
            _graph(nodes, family),
            _glossary(),
        ),
        element(
            "footer",
            element("p", "Written by Lockstep’s report stage. Same inputs, same bytes."),
        ),
    )
    return document(story.headline, STYLE, body)


def _header(story: Story, concerns: Sequence[Concern], *, has_tasks: bool) -> Markup:
    links = {
        "iterations": "Iterations",
        **({"tasks": "Tasks"} if has_tasks else {}),
        "samples": "Samples",
        "training": "Training",
        "params": "Params",
        "graph": "Graph",
        "glossary": "Glossary",
    }
    nav = element("nav", [element("a", text, href=f"#{slug}") for slug, text in links.items()])
    caveats = [element("li", caveat) for caveat in story.caveats]
    return element(
        "header",
        element("div", element("p", "Lockstep", class_="brand"), nav, class_="top"),
        element("h1", story.headline, ".", class_=story.outcome.value),
        element("p", story.lead, class_="lead"),
        element("p", story.method, ".", class_="method"),
        element("ul", caveats, class_="caveats") if caveats else None,
        _concerns(concerns) if concerns else None,
    )


def _concerns(concerns: Sequence[Concern]) -> Markup:
    items = [
        element(
            "li",
            element("h3", concern.title, element("span", concern.names, class_="note")),
            element("p", _as_sentence(concern.last.sentence)),
            element("p", f"To try: {concern.last.advice}.", class_="note"),
        )
        for concern in concerns
    ]
    return element(
        "section",
        element(
            "h2", "1 warning" if len(concerns) == 1 else f"{len(concerns)} warnings", id="warnings"
        ),
        element("ul", items),
        element("p", "Thresholds are under warn in params.yaml.", class_="note"),
        class_="warnings",
        aria_labelledby="warnings",
    )


def _as_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _cards(family: Family, evidence: Evidence, pairs: Sequence[BeforeAfter]) -> Markup:
    first, last = evidence.evaluations[ROOT], evidence.evaluations[family.final]
    # From the reference itself the KL starts at 0 for sure.
    errors = {
        "accuracy": accuracy_gain_error(pairs),
        "reward_mean": last.get("reward_gain_error"),
        "kl_to_reference": last.get("kl_to_reference_error"),
    }

    def moved(metric: str, note: str) -> Markup:
        form = EVALUATION[metric].format
        before, after = first.get(metric), last.get(metric)
        if before is None or after is None:
            return _card(EVALUATION[metric].label, write(after, form), "", note)
        change = write_change(before, after, form)
        error = write_error(after - before, errors.get(metric), form)
        return _card(
            EVALUATION[metric].label,
            write(after, form),
            f"{change} {error}".strip(),
            f"from {write(before, form)}; {note}",
        )

    def won(metric: str, note: str) -> Markup:
        low, high = last.get(f"{metric}_low"), last.get(f"{metric}_high")
        rate, error = last.get(metric), last.get(error_name(metric))
        sure = (
            f"95%: {write_interval(low, high)}"
            if low is not None
            else f"{write_error(rate, error, Form.SHARE)}; 50% is no difference".lstrip("; ")
        )
        return _card(EVALUATION[metric].label, write(rate, Form.SHARE), sure, note)

    is_judged = "accuracy" in last
    return element(
        "section",
        moved("accuracy", "held-out answers that are right") if is_judged else None,
        won("win_rate", "of greedy responses against SFT’s"),
        None if is_judged else won("win_rate_sampled", "of sampled responses against SFT’s"),
        moved("reward_mean", "mean on held-out prompts"),
        moved("kl_to_reference", "nats per token away from SFT"),
        moved("entropy", "nats per token, 0 is collapse"),
        _card(
            "Reward source",
            write(evidence.pairwise_accuracy, Form.SHARE),
            "of pairs ranked right",
            "held-out pairs; 50% is a coin toss"
            if evidence.pairwise_accuracy is not None
            else "no held-out pair to rank",
        ),
        class_="cards",
        aria_label="Key numbers",
    )


def _card(label: str, value: str, change: str, note: str) -> Markup:
    return element(
        "div",
        element("h3", label),
        element("p", value, class_="figure"),
        element("p", change, class_="change"),
        element("p", note, class_="note"),
        class_="card",
    )


def _iterations(params: Params, family: Family, evidence: Evidence) -> Markup:
    return _section(
        "iterations",
        "Over the iterations",
        f"Each policy on the same held-out prompts. {family.final} is the final one: the last that "
        "params.yaml names. Accuracy and win rate are of the greedy response, with 95% intervals; "
        "all else is of sampled ones. ± is one standard error over prompts.",
        charts.legend(family),
        _drawn(charts.figures(family, evidence, params)),
        tables.policies(family, evidence),
        element("h3", "One against another"),
        element(
            "p",
            "How often the greedy response of the policy in the row gets a higher reward than that "
            "of the policy above; a tie counts half.",
            class_="note",
        ),
        tables.head_to_head(family, evidence),
    )


def _drawn(figures: Sequence[charts.Figure]) -> Markup:
    cells = []
    for figure in figures:
        key = [element("span", charts.swatch(style), name) for style, name in figure.key]
        caption = element(
            "figcaption",
            element("div", element("h3", figure.title), element("p", key, class_="key")),
            element("p", figure.reading, class_="note"),
        )
        cells.append(element("figure", caption, figure.svg))
    return element("div", cells, class_="charts")


def _tasks(family: Family, evidence: Evidence) -> Markup | None:
    if not evidence.tasks[family.final]:
        return None
    return _section(
        "tasks",
        "Task by task",
        f"The SFT policy and {family.final} on the held-out prompts of each task. A few prompts "
        "say little: look at the interval.",
        tables.tasks(family, evidence),
    )


def _samples(params: Params, family: Family, pairs: list[BeforeAfter]) -> Markup:
    shown = choose(pairs, params.report.samples)
    rose, fell = extremes(pairs, max(1, params.report.samples // 4))
    return _section(
        "samples",
        "Before and after",
        f"Greedy responses of the SFT policy and of {family.final}. The bar counts all "
        f"{len(pairs):,} held-out prompts; the {len(shown)} below are picked for how much their "
        "reward changed, not at random.",
        tables.outcomes(pairs),
        tables.samples(tables.by_outcome(shown), family.final),
        element("h3", "Gained and lost most"),
        tables.samples(
            {"Reward rose most": rose, "Reward fell most": fell},
            family.final,
            "samples extremes",
        )
        if rose or fell
        else element("p", "No reward changed.", class_="empty"),
    )


def _training(params: Params, family: Family, evidence: Evidence) -> Markup:
    source = "Reward model" if params.rl.reward == "reward_model" else "Reward source"
    return _section(
        "training",
        "What training did",
        "Measured on the prompts that were trained on, not on the held-out ones. Curves over the "
        "steps of one iteration are in MLflow, under step/.",
        _drawn(charts.training_figures(family, evidence)),
        tables.training(family, evidence),
        element(
            "div",
            tables.plain_metrics("Data", evidence.prepare),
            tables.plain_metrics("Supervised fine-tuning", evidence.sft),
            tables.plain_metrics(f"{source}, on held-out pairs", evidence.reward)
            if evidence.reward
            else None,
            class_="columns",
        ),
    )


def _params(params: Params) -> Markup:
    return _section(
        "params",
        "Params that differ from the defaults",
        "",
        tables.changed_params(changes.from_defaults(params)),
    )


def _graph(nodes: Sequence[Mapping[str, Any]], family: Family) -> Markup:
    if not nodes:
        content = element("p", "No graph was given to this report.", class_="empty")
    else:
        content = element(
            "div",
            graph.draw(nodes, family),
            class_="scroll",
            role="region",
            aria_label="Graph of stages",
            tabindex="0",
        )
    return _section(
        "graph",
        "Where it came from",
        "Every stage with the first digits of its outputs’ hashes, as in dvc.lock; hover for the "
        "whole hash. An arrow that a longer way implies is left out.",
        content,
    )


def _glossary() -> Markup:
    meanings = _TERMS | {metric.label: metric.meaning for metric in EVALUATION.values()}
    entries = [
        element("div", element("dt", term), element("dd", meaning))
        for term, meaning in meanings.items()
    ]
    return _section("glossary", "Glossary", "", element("dl", entries, class_="glossary"))


def _section(slug: str, title: str, note: str, *content: Child) -> Markup:
    return element(
        "section",
        element("h2", title, id=slug),
        element("p", note, class_="intro") if note else None,
        *content,
        aria_labelledby=slug,
    )
