"""The tables of the page: policies, samples before and after, training, changed params."""

import statistics
from collections.abc import Mapping, Sequence

from stages.evaluation.answers import Answer, Answered
from stages.evaluation.contest import greedy_outcomes
from stages.reporting.changes import Change
from stages.reporting.comparison import BeforeAfter, Outcome, count
from stages.reporting.evidence import (
    ITERATION_STAGES,
    ONLINE_STAGES,
    PREFERENCE_STAGES,
    Evidence,
)
from stages.reporting.family import ROOT, Family
from stages.reporting.markup import Child, Markup, element
from stages.reporting.vocabulary import (
    MISSING,
    Form,
    describe,
    in_order,
    pass_metrics,
    spell_out,
    write,
    write_change,
    write_error,
    write_interval,
)
from stages.standard_error import error_name, standard_error

_QUALITY = ("accuracy", "accuracy_sampled", "majority_vote")
_WINS = ("win_rate", "win_rate_sampled", "win_rate_similar_length")
_GAIN = ("reward_gain",)
_OTHERS = (
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
_MOST_CONTESTANTS = 8
NO_TASK = "(no task)"


def policies(family: Family, evidence: Evidence) -> Markup:
    """The numbers behind the charts."""
    columns = policy_columns(evidence)
    head = ["Policy", "Starts from", *(describe(name).label for name in columns)]
    rows = []
    for policy in family.policies:
        metrics = evidence.evaluations[policy]
        mark = element("span", "final", class_="tag") if policy == family.final else None
        cells = [
            element("td", write(metrics.get(name), describe(name).format), _beside(name, metrics))
            for name in columns
        ]
        name = element("th", policy, " ", mark, scope="row")
        parent = element("td", family.parents.get(policy, MISSING), class_="text")
        rows.append(element("tr", name, parent, cells))
    return _scrolling("Held-out numbers of each policy", _table(head, rows, "numbers", num_text=2))


def policy_columns(evidence: Evidence) -> list[str]:
    """What is known of at least one policy, in the order in which it is shown."""
    known = {name for metrics in evidence.evaluations.values() for name in metrics}
    if "accuracy_sampled" in known:
        known.discard("pass_at_1")  # the same number
    first, *others = _QUALITY
    ordered = [first, *others[:1], *pass_metrics(known), *others[1:], *_WINS, *_GAIN, *_OTHERS]
    return [name for name in ordered if name in known or name in _OTHERS]


def tasks(family: Family, evidence: Evidence) -> Markup:
    """Each task before and after; by accuracy where there is one, and by reward."""
    before, after = (
        {row["task"]: row for row in evidence.tasks[policy]} for policy in (ROOT, family.final)
    )
    is_judged = any(row["accuracy"] is not None for row in after.values())
    head = ["Task", "Prompts"]
    if is_judged:
        head += [f"Accuracy: {ROOT}", f"Accuracy: {family.final}", "Change", "Accuracy, 95%"]
    head += ["Win rate", "Win rate, 95%", "Reward"]
    rows = []
    for task, row in after.items():
        old = before.get(task, {}).get("accuracy")
        new = row["accuracy"]
        moved = MISSING if old is None or new is None else write_change(old, new, Form.SHARE)
        judged = (
            [
                write(old, Form.SHARE),
                write(new, Form.SHARE),
                moved,
                write_interval(row["accuracy_low"], row["accuracy_high"]),
            ]
            if is_judged
            else []
        )
        cells = [
            write(row["num_prompts"], Form.COUNT),
            *judged,
            write(row["win_rate"], Form.SHARE),
            write_interval(row["win_rate_low"], row["win_rate_high"]),
            [write(row["reward_mean"]), _beside("reward_mean", row)],
        ]
        name = element("th", task or NO_TASK, scope="row")
        rows.append(element("tr", name, [element("td", cell) for cell in cells]))
    return _scrolling("Numbers of each task", _table(head, rows, "numbers tasks", num_text=1))


def head_to_head(family: Family, evidence: Evidence) -> Markup:
    """How often the greedy response of the policy in the row beats that of the one above."""
    policies = family.policies
    if len(policies) > _MOST_CONTESTANTS:
        policies = [ROOT, *policies[1 - _MOST_CONTESTANTS :]]
    rows = []
    for mine in policies:
        cells = [
            element("td", MISSING if mine == theirs else _beats(evidence, mine, theirs))
            for theirs in policies
        ]
        rows.append(element("tr", element("th", mine, scope="row"), cells))
    table = _table(["Wins against", *policies], rows, "numbers contest", num_text=1)
    return _scrolling("Win rate of each policy against each other", table)


def outcomes(pairs: Sequence[BeforeAfter]) -> Markup:
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


def samples(
    groups: Mapping[str, Sequence[BeforeAfter]], final: str, class_: str = "samples"
) -> Markup:
    """Prompts with the responses before and after, their rewards and whether they are right."""
    head = ["Prompt", "Expected", f"Before: {ROOT}", f"After: {final}"]
    rows = []
    for title, pairs in groups.items():
        if pairs:
            heading = element("th", title, colspan=4, scope="rowgroup")
            rows.append(element("tr", heading, class_="group"))
        rows += [
            element(
                "tr",
                element("th", _text(pair.before.prompt), _task(pair.before), scope="row"),
                element("td", _text(pair.before.answer or MISSING), data_label=head[1]),
                element("td", _response(pair.before.greedy), data_label=head[2]),
                element("td", _response(pair.after.greedy), data_label=head[3]),
            )
            for pair in pairs
        ]
    return _table(head, rows, class_, num_text=4)


def by_outcome(pairs: Sequence[BeforeAfter]) -> dict[str, list[BeforeAfter]]:
    """Pairs under the name of what became of them."""
    return {
        outcome.value.capitalize(): [pair for pair in pairs if pair.outcome is outcome]
        for outcome in Outcome
    }


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
                element(
                    "td",
                    write(measured[iteration].get(name), metric.format),
                    _beside(name, measured[iteration]),
                )
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
            element("dt", _short_label(name)),
            element("dd", write(value, _plain_format(name, value))),
        )
        for name, value in metrics.items()
    ]
    return element("div", element("h3", title), element("dl", rows, class_="facts"))


def _plain_format(name: str, value: float) -> Form:
    known = describe(name).format
    return Form.COUNT if known is Form.NUMBER and value.is_integer() else known


def _short_label(name: str) -> str:
    """Counts of a stage's data by their own names; what the glossary knows by its."""
    return spell_out(name) if name.startswith("num_") else describe(name).label


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


def _beats(evidence: Evidence, mine: str, theirs: str) -> list[str | None]:
    won = greedy_outcomes(evidence.answered[mine], evidence.answered[theirs])
    share, error = statistics.fmean(won), standard_error(won, range(len(won)))
    return [write(share, Form.SHARE), _small(write_error(share, error, Form.SHARE))]


def _beside(name: str, metrics: Mapping[str, float]) -> Markup | None:
    """The interval or the standard error of a value, where there is one."""
    low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
    if low is not None:
        return _small(write_interval(low, high))
    form = describe(name).format
    return _small(write_error(metrics.get(name), metrics.get(error_name(name)), form))


def _small(text: str) -> Markup | None:
    return element("small", text) if text else None


def _task(item: Answered) -> Markup | None:
    return element("small", item.task) if item.task else None


def _response(answer: Answer) -> list[Markup]:
    judged = element(
        "span",
        "✓ right" if answer.correct else "✗ wrong",
        class_="right" if answer.correct else "wrong",
    )
    cut = ", cut off" if answer.finish_reason == "length" else ""
    note = element(
        "p",
        judged if answer.correct is not None else None,
        element("span", f"reward {write(answer.reward)}{cut}", class_="reward"),
        class_="mark",
    )
    return [_text(answer.response or "(empty)"), note]


def _text(text: str) -> Markup:
    rest = len(text) - _LONGEST_TEXT
    shown = text if rest <= 0 else f"{text[:_LONGEST_TEXT]}… ({rest:,} more characters)"
    return element("div", shown, class_="sample")


def _metric_names(columns: Sequence[Mapping[str, float]]) -> list[str]:
    """All but errors, which stand beside what they belong to."""
    names = {name for metrics in columns for name in metrics}
    return in_order(names - {error_name(name) for name in names})


def _table(head: Sequence[str], rows: Child, class_: str, num_text: int) -> Markup:
    cells = [
        element("th", title, scope="col", class_="text" if index < num_text else None)
        for index, title in enumerate(head)
    ]
    header = element("thead", element("tr", cells))
    return element("table", header, element("tbody", rows), class_=class_)


def _scrolling(label: str, content: Markup) -> Markup:
    return element("div", content, class_="scroll", role="region", aria_label=label, tabindex="0")
