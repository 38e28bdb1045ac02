"""The page: the whole report as one HTML file."""

from collections.abc import Mapping, Sequence
from typing import Any

from stages.contracts.params import Params
from stages.reporting import changes, charts, graph, tables
from stages.reporting.comparison import Pair, choose
from stages.reporting.concerns import Concern
from stages.reporting.evidence import Evidence
from stages.reporting.family import ROOT, Family
from stages.reporting.markup import Child, Markup, document, element, join
from stages.reporting.story import Story
from stages.reporting.style import STYLE
from stages.reporting.vocabulary import EVALUATION, Format, write, write_change

_TERMS = {
    "Policy": "The language model that is being trained; each iteration makes a new one.",
    "SFT": "Supervised fine-tuning on demonstrations, which makes the policy that RL starts from.",
    "Reference": "The SFT policy, kept as it was, against which drift is measured.",
    "Iteration": "One round: sample responses, score them, update the policy.",
}


def render(
    params: Params,
    family: Family,
    evidence: Evidence,
    story: Story,
    concerns: Sequence[Concern],
    pairs: list[Pair],
    nodes: Sequence[Mapping[str, Any]],
) -> str:
    """The whole document."""
    body = join(
        _header(story, concerns),
        element(
            "main",
            _cards(family, evidence),
            _iterations(params, family, evidence),
            _samples(params, family, pairs),
            _training(family, evidence),
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


def _header(story: Story, concerns: Sequence[Concern]) -> Markup:
    links = {
        "iterations": "Iterations",
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
        element("h1", story.headline, ".", class_=story.verdict.value),
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


def _cards(family: Family, evidence: Evidence) -> Markup:
    first, last = evidence.evaluations[ROOT], evidence.evaluations[family.final]

    def moved(metric: str, note: str) -> Markup:
        form = EVALUATION[metric].format
        before, after = first.get(metric), last.get(metric)
        if before is None or after is None:
            return _card(EVALUATION[metric].label, write(after, form), "", note)
        change = write_change(before, after, form)
        return _card(
            EVALUATION[metric].label,
            write(after, form),
            change,
            f"from {write(before, form)}; {note}",
        )

    return element(
        "section",
        moved("accuracy", "held-out answers exactly right"),
        moved("accuracy_sampled", "the same, with sampling"),
        moved("reward_mean", "mean on held-out prompts"),
        moved("kl_to_reference", "nats per token away from SFT"),
        moved("entropy", "nats per token, 0 is collapse"),
        _card(
            "Reward source",
            write(evidence.pairwise_accuracy, Format.SHARE),
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
    cells = []
    for figure in charts.figures(family, evidence, params):
        key = [element("span", charts.swatch(style), name) for style, name in figure.key]
        caption = element(
            "figcaption",
            element("div", element("h3", figure.title), element("p", key, class_="key")),
            element("p", figure.reading, class_="note"),
        )
        cells.append(element("figure", caption, figure.svg))
    return _section(
        "iterations",
        "Over the iterations",
        f"Each policy on the same held-out prompts. {family.final} is the final one: the last that "
        "params.yaml names. Accuracy is of the greedy response; all else is of sampled ones.",
        charts.legend(family),
        element("div", cells, class_="charts"),
        tables.policies(family, evidence),
    )


def _samples(params: Params, family: Family, pairs: list[Pair]) -> Markup:
    shown = choose(pairs, params.report.samples)
    return _section(
        "samples",
        "Before and after",
        f"Greedy responses of the SFT policy and of {family.final}. The bar counts all "
        f"{len(pairs):,} held-out prompts; the {len(shown)} below are picked for how much their "
        "reward changed, not at random.",
        tables.outcomes(pairs),
        tables.samples(shown, family.final),
    )


def _training(family: Family, evidence: Evidence) -> Markup:
    return _section(
        "training",
        "What training did",
        "Measured on the prompts that were trained on, not on the held-out ones.",
        tables.training(family, evidence),
        element(
            "div",
            tables.plain_metrics("Data", evidence.prepare),
            tables.plain_metrics("Supervised fine-tuning", evidence.sft),
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
