"""The tables of the page: policies, samples before and after, training, changed params."""

from collections.abc import Mapping, Sequence

from stages.reporting.changes import Change
from stages.reporting.comparison import Outcome, Pair, count
from stages.reporting.evidence import (
    ITERATION_STAGES,
    ONLINE_STAGES,
    PREFERENCE_STAGES,
    Evidence,
    Sample,
)
from stages.reporting.family import ROOT, Family
from stages.reporting.markup import Child, Markup, element
from stages.reporting.vocabulary import EVALUATION, MISSING, Format, describe, spell_out, write

POLICY_COLUMNS = (
    "accuracy",
    "accuracy_sampled",
    "reward_mean",
    "reward_std",
    "kl_to_reference",
    "entropy",
    "response_length",
    "truncation_rate",
)
_STAGE_TITLES = {
    "preference": "Learning from preferences",
    "online": "Fused steps, the last of them",
    "rollout": "Sampling responses",
    "score": "Scoring them",
    "policy_update": "Learning from them",
}
# policy_update repeats these so that its run can be compared alone; here they stand above it.
_REPEATED = ("response_length", "truncation_rate", "reward_mean", "reward_std")
_LONGEST_TEXT = 1500


def policies(family: Family, evidence: Evidence) -> Markup:
    """The numbers behind the charts."""
    head = ["Policy", "Starts from", *(EVALUATION[name].label for name in POLICY_COLUMNS)]
    rows = []
    for policy in family.policies:
        metrics = evidence.evaluations[policy]
        mark = element("span", "final", class_="tag") if policy == family.final else None
        cells = [element("td", write(metrics.get(n), EVALUATION[n].format)) for n in POLICY_COLUMNS]
        name = element("th", policy, " ", mark, scope="row")
        parent = element("td", family.parents.get(policy, MISSING), class_="text")
        rows.append(element("tr", name, parent, cells))
    return _scrolling("Held-out numbers of each policy", _table(head, rows, "numbers", num_text=2))


def outcomes(pairs: Sequence[Pair]) -> Markup:
    """One bar that divides the held-out prompts by what became of them."""
    parts, key = [], []
    for outcome, number in count(pairs).items():
        kind = outcome.value.replace(" ", "-")
        share = 100 * number / max(len(pairs), 1)
        if number:
            title = f"{number} {outcome.value}"
            parts.append(element("span", class_=kind, style=f"width:{share:.3f}%", title=title))
        label = element("b", f"{number:,}")
        key.append(element("li", element("i", class_=kind), label, f" {outcome.value}"))
    return element(
        "div",
        element("div", parts, class_="bar", aria_hidden="true"),
        element("ul", key, class_="legend"),
        class_="outcomes",
    )


def samples(pairs: Sequence[Pair], final: str) -> Markup:
    """Prompts with the responses before and after, their rewards and whether they are right."""
    head = ["Prompt", "Expected", f"Before: {ROOT}", f"After: {final}"]
    rows = []
    previous: Outcome | None = None
    for pair in pairs:
        if pair.outcome is not previous:
            title = element("th", pair.outcome.value.capitalize(), colspan=4, scope="rowgroup")
            rows.append(element("tr", title, class_="group"))
            previous = pair.outcome
        rows.append(
            element(
                "tr",
                element("th", _text(pair.before.prompt), scope="row"),
                element("td", _text(pair.before.answer or MISSING), data_label=head[1]),
                element("td", _response(pair.before), data_label=head[2]),
                element("td", _response(pair.after), data_label=head[3]),
            )
        )
    return _table(head, rows, "samples", num_text=4)


def training(family: Family, evidence: Evidence) -> Markup:
    """Each iteration's own metrics; every row says what it means."""
    iterations = list(family.parents)
    explained: set[str] = set()
    rows = []
    for stage in (*PREFERENCE_STAGES, *ITERATION_STAGES, *ONLINE_STAGES):
        measured = {it: evidence.training[it].get(stage, {}) for it in iterations}
        if not any(measured.values()):
            continue
        title = element("th", _STAGE_TITLES[stage], colspan=len(iterations) + 1, scope="rowgroup")
        rows.append(element("tr", title, class_="group"))
        for name in _metric_names(list(measured.values())):
            if stage == "policy_update" and name in _REPEATED:
                continue
            metric = describe(name)
            # A metric that two stages measure is explained once.
            fresh = metric.meaning and name not in explained
            meaning = element("small", metric.meaning) if fresh else None
            explained.add(name)
            cells = [
                element("td", write(measured[iteration].get(name), metric.format))
                for iteration in iterations
            ]
            rows.append(element("tr", element("th", metric.label, meaning, scope="row"), cells))
    table = _table(["Metric", *iterations], rows, "numbers training", num_text=1)
    return _scrolling("Training metrics of each iteration", table)


def plain_metrics(title: str, metrics: Mapping[str, float]) -> Markup:
    """A stage's summary, as it is."""
    rows = [
        element(
            "div",
            element("dt", spell_out(name)),
            element("dd", write(value, Format.COUNT if value.is_integer() else Format.NUMBER)),
        )
        for name, value in metrics.items()
    ]
    return element("div", element("h3", title), element("dl", rows, class_="facts"))


def changed_params(changes: Sequence[Change]) -> Markup:
    """Dotted keys with their default and the value of this run."""
    if not changes:
        return element("p", "None: every param has its default.", class_="empty")
    rows = [
        element(
            "tr",
            element("th", element("code", change.key), scope="row"),
            element("td", element("code", change.default), class_="default"),
            element("td", element("code", change.value)),
        )
        for change in changes
    ]
    table = _table(["Param", "Default", "This run"], rows, "params", num_text=3)
    return _scrolling("Params that differ from the defaults", table)


def _response(sample: Sample) -> list[Markup]:
    mark = "✓ right" if sample.correct else "✗ wrong"
    kind = "right" if sample.correct else "wrong"
    note = element(
        "p",
        element("span", mark, class_=kind),
        element("span", f"reward {write(sample.reward)}", class_="reward"),
        class_="mark",
    )
    return [_text(sample.response or "(empty)"), note]


def _text(text: str) -> Markup:
    rest = len(text) - _LONGEST_TEXT
    shown = text if rest <= 0 else f"{text[:_LONGEST_TEXT]}… ({rest:,} more characters)"
    return element("div", shown, class_="sample")


def _metric_names(columns: Sequence[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for metrics in columns for name in metrics))


def _table(head: Sequence[str], rows: Child, class_: str, num_text: int) -> Markup:
    cells = [
        element("th", title, scope="col", class_="text" if index < num_text else None)
        for index, title in enumerate(head)
    ]
    header = element("thead", element("tr", cells))
    return element("table", header, element("tbody", rows), class_=class_)


def _scrolling(label: str, content: Markup) -> Markup:
    return element("div", content, class_="scroll", role="region", aria_label=label, tabindex="0")
