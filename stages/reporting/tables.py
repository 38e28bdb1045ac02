"""What is in the tables of the page: policies, tasks, contests, training; outcomes and facts."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.evaluation.contest import greedy_outcomes
from stages.reporting.comparison import BeforeAfter, Outcome, count
from stages.reporting.evidence import (
    ITERATION_STAGES,
    ONLINE_STAGES,
    PREFERENCE_STAGES,
    Evidence,
)
from stages.reporting.family import ROOT, Family
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

_WINS = ("win_rate", "win_rate_sampled", "win_rate_similar_length", "reward_gain")
_ALWAYS = (
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


@dataclass(frozen=True)
class Cell:
    text: str
    beside: str = ""
    """How sure that is."""


@dataclass(frozen=True)
class Row:
    name: str
    cells: Sequence[Cell]
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Rows under a heading, if it has one."""

    rows: Sequence[Row]
    title: str = ""


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    groups: Sequence[Group]

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows]


@dataclass(frozen=True)
class Slice:
    """The prompts with one outcome, as a part of the bar."""

    name: str
    number: int
    percent: str


def policies(family: Family, evidence: Evidence) -> Table:
    """The numbers behind the charts; the note of a row is where the policy starts from."""
    columns = _policy_columns(evidence)
    rows = [
        Row(
            policy,
            [_cell(name, evidence.evaluations[policy]) for name in columns],
            family.parents.get(policy, MISSING),
        )
        for policy in family.policies
    ]
    head = ["Policy", "Starts from", *(describe(name).label for name in columns)]
    return Table(head, [Group(rows)])


def _policy_columns(evidence: Evidence) -> list[str]:
    """What is known of at least one policy, in the order in which it is shown."""
    known = {name for metrics in evidence.evaluations.values() for name in metrics}
    if "accuracy_sampled" in known:
        known.discard("pass_at_1")  # the same number
    right = ("accuracy", "accuracy_sampled", *pass_metrics(known), "majority_vote")
    return [*(name for name in (*right, *_WINS) if name in known), *_ALWAYS]


def tasks(family: Family, evidence: Evidence) -> Table:
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
        texts = [
            write(row["num_prompts"], Form.COUNT),
            *judged,
            write(row["win_rate"], Form.SHARE),
            write_interval(row["win_rate_low"], row["win_rate_high"]),
        ]
        reward = Cell(write(row["reward_mean"]), _beside("reward_mean", row))
        rows.append(Row(task or NO_TASK, [*map(Cell, texts), reward]))
    return Table(head, [Group(rows)])


def head_to_head(family: Family, evidence: Evidence) -> Table:
    """How often the greedy response of the policy in the row beats that of the one above."""
    policies = family.policies
    if len(policies) > _MOST_CONTESTANTS:
        policies = [ROOT, *policies[1 - _MOST_CONTESTANTS :]]
    rows = [
        Row(
            mine,
            [
                Cell(MISSING) if mine == theirs else _beats(evidence, mine, theirs)
                for theirs in policies
            ],
        )
        for mine in policies
    ]
    return Table(["Wins against", *policies], [Group(rows)])


def outcomes(pairs: Sequence[BeforeAfter]) -> list[Slice]:
    """The held-out prompts by what became of them."""
    return [
        Slice(outcome.value, number, f"{100 * number / max(len(pairs), 1):.3f}")
        for outcome, number in count(pairs).items()
    ]


def by_outcome(pairs: Sequence[BeforeAfter]) -> dict[str, list[BeforeAfter]]:
    """Pairs under the name of what became of them."""
    return {
        outcome.value.capitalize(): [pair for pair in pairs if pair.outcome is outcome]
        for outcome in Outcome
    }


def training(family: Family, evidence: Evidence) -> Table:
    """Each iteration's own metrics; every row says what it means."""
    iterations = list(family.parents)
    explained: set[str] = set()
    groups = []
    for stage in (*PREFERENCE_STAGES, *ITERATION_STAGES, *ONLINE_STAGES):
        measured = {it: evidence.training[it].get(stage, {}) for it in iterations}
        if not any(measured.values()):
            continue
        rows = []
        names = {name for metrics in measured.values() for name in metrics}
        # Errors stand beside what they belong to.
        for name in in_order(names - {error_name(name) for name in names}):
            if stage == "policy_update" and name in _REPEATED:
                continue
            # A metric that two stages measure is explained once.
            meaning = "" if name in explained else describe(name).meaning
            explained.add(name)
            cells = [_cell(name, measured[iteration]) for iteration in iterations]
            rows.append(Row(describe(name).label, cells, meaning))
        groups.append(Group(rows, _STAGE_TITLES[stage]))
    return Table(["Metric", *iterations], groups)


def facts(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """A stage's summary, as it is."""
    rows = []
    for name, value in metrics.items():
        known = describe(name)
        # Counts of a stage's data go by their own names.
        label = spell_out(name) if name.startswith("num_") else known.label
        is_count = known.format is Form.NUMBER and value.is_integer()
        rows.append((label, write(value, Form.COUNT if is_count else known.format)))
    return rows


def shorten(text: str) -> str:
    rest = len(text) - _LONGEST_TEXT
    return text if rest <= 0 else f"{text[:_LONGEST_TEXT]}… ({rest:,} more characters)"


def _beats(evidence: Evidence, mine: str, theirs: str) -> Cell:
    won = greedy_outcomes(evidence.answered[mine], evidence.answered[theirs])
    share, error = statistics.fmean(won), standard_error(won, range(len(won)))
    return Cell(write(share, Form.SHARE), write_error(share, error, Form.SHARE))


def _cell(name: str, metrics: Mapping[str, float]) -> Cell:
    return Cell(write(metrics.get(name), describe(name).format), _beside(name, metrics))


def _beside(name: str, metrics: Mapping[str, float]) -> str:
    """The interval or the standard error of a value, where there is one."""
    low, high = metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
    if low is not None:
        return write_interval(low, high)
    form = describe(name).format
    return write_error(metrics.get(name), metrics.get(error_name(name)), form)
