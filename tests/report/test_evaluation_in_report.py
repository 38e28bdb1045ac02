"""What the report says of tasks, of wins, and of policies that nobody can call right or wrong."""

import re
import statistics
from collections.abc import Callable

import pyarrow.parquet as pq
import pytest

from stages.context import StageError
from stages.evaluation import folder
from tests.report.conftest import Page


def carries(number: int) -> str | None:
    return None if number < 4 else "carry" if number % 4 else "no carry"


def right(run, policy: str, task: str | None) -> str:
    """Share of the task's prompts that are right, counted in the samples."""
    path = run.inputs["evaluations"] / policy / folder.GREEDY
    found = [item.greedy.correct for item in folder.read_greedy(path) if item.task == task]
    return f"{100 * sum(found) / len(found):.1f}%"


def test_each_task_stands_before_and_after(finished_run: Callable) -> None:
    run = finished_run(task=carries)
    page, summary, _ = run.report()
    head, *rows = Page(page).rows("numbers tasks")
    assert head[:4] == ["Task", "Prompts", "Accuracy: sft", "Accuracy: iter_003"]
    assert [row[0] for row in rows] == ["carry", "no carry", "(no task)"]
    for row, task in zip(rows, ("carry", "no carry", None), strict=True):
        assert row[2:4] == [right(run, "sft", task), right(run, "iter_003", task)]
    assert [row[1] for row in rows] == ["189", "63", "4"]
    assert 'href="#tasks"' in page
    lines = [re.split(r" *\| *", line)[1:-1] for line in summary.splitlines() if line[:1] == "|"]
    assert ["carry", "189", *rows[0][2:4], rows[0][6]] in lines
    assert ["no carry", "63", *rows[1][2:4], rows[1][6]] in lines


def test_a_report_without_tasks_does_not_speak_of_them(finished_run: Callable) -> None:
    page, summary, _ = finished_run().report()
    assert "#tasks" not in page
    assert "| task" not in summary


def test_many_tasks_are_all_on_the_page_and_the_largest_in_the_summary(
    finished_run: Callable,
) -> None:
    run = finished_run(task=lambda number: f"task {number % 20:02}")
    page, summary, _ = run.report()
    assert len(Page(page).rows("numbers tasks")) == 21
    assert len(re.findall(r"^\| task \d", summary, re.MULTILINE)) == 8
    assert "12 more tasks are in the report" in summary
    assert max(map(len, summary.splitlines())) <= 92


def test_every_policy_is_held_against_every_other(finished_run: Callable) -> None:
    run = finished_run()
    page, _, _ = run.report()
    head, *rows = Page(page).rows("numbers contest")
    assert head == ["Wins against", "sft", "iter_001", "iter_002", "iter_003"]
    grid = {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    for one, against in grid.items():
        for other, share in against.items():
            if one == other:
                assert share == "–"
            else:
                (rate, error), (back, as_much) = (
                    cell.split("% ± ") for cell in (share, grid[other][one])
                )
                assert float(rate) + float(back) == pytest.approx(100, abs=0.11)
                assert error == as_much
    final = [row[0] for row in rows][-1]
    metrics = run.evaluation(final)
    won = pq.read_table(run.inputs["evaluations"] / final / folder.GREEDY)["won"].to_pylist()
    error = statistics.stdev(won) / len(won) ** 0.5
    assert grid[final]["sft"] == f"{100 * metrics['win_rate']:.1f}% ± {100 * error:.1f}"


def test_only_so_many_policies_are_held_against_each_other(finished_run: Callable) -> None:
    names = ["sft", *(f"iter_{number:03}" for number in range(1, 13))]
    chain = {name: {"policy": names[place]} for place, name in enumerate(names[1:])}
    page, _, _ = finished_run(rl={"iterations": chain}).report()
    head, *rows = Page(page).rows("numbers contest")
    assert head[1:] == ["sft", *names[-7:]]
    assert len(rows) == 8


def test_what_gained_and_lost_most_is_shown(finished_run: Callable) -> None:
    run = finished_run(report={"samples": 4})
    gains = {7: 50.0, 9: -50.0}
    run.change_samples(
        "iter_003",
        lambda i, row: {"reward": row["reward"] + gains.get(i, 0.0), "response": f"new {i}"},
    )
    page, _, _ = run.report()
    shown = Page(page).rows("samples extremes")
    assert [row[0] for row in shown if len(row) == 1] == ["Reward rose most", "Reward fell most"]
    assert [row[3].split("  ")[0] for row in shown if len(row) == 4][1:] == ["new 7", "new 9"]


def test_the_same_response_has_not_gained(finished_run: Callable) -> None:
    run = finished_run()
    before = run.samples("sft")
    run.change_samples("iter_003", lambda i, _: {**before[i], "reward": before[i]["reward"] + 1e-6})
    page, _, _ = run.report()
    assert "No reward changed." in page


@pytest.mark.parametrize(
    ("shift", "headline"),
    [(1.0, "It learned"), (-1.0, "It got worse"), (0.0, "No clear change")],
)
def test_without_answers_rewards_decide(
    finished_run: Callable, shift: float, headline: str
) -> None:
    run = finished_run(judged=False)
    before = [
        row | {"reward": row["reward"] + shift, "response": f"other {row['response']}"}
        for row in run.samples("sft")
    ]
    run.change_samples("iter_003", lambda i, _: before[i])
    page, summary, metrics = run.report()
    won = {1.0: "100.0%", -1.0: "0.0%", 0.0: "50.0%"}[shift]
    assert summary.startswith(f"# {headline}: by reward it wins {won} against the supervised")
    text = Page(page).text
    assert "The data do not say which answers are right." in text
    assert "accuracy rose" not in text
    assert not [name for name in metrics if "accuracy" in name and "pairwise" not in name]
    assert "✓" not in page + summary
    assert "✗" not in page + summary
    assert "None" not in summary
    head = Page(page).rows("numbers")[0]
    assert "Accuracy" not in head
    assert "Win rate" in head


def test_prompts_without_an_answer_are_counted_apart(finished_run: Callable) -> None:
    run = finished_run()
    unjudged = {"correct": None, "answer": None}
    for policy in ("sft", "iter_001", "iter_002", "iter_003"):
        run.change_samples(policy, lambda i, _: unjudged if i < 56 else {})
    page, summary, _ = run.report()
    assert "Of 200 held-out prompts with an answer to compare with" in " ".join(summary.split())
    bar = re.search(r'<ul class="legend">(.*?)</ul>', page, re.DOTALL)
    assert bar is not None
    counts = [int(number) for number in re.findall(r"<b>([\d,]+)</b>", bar[1])]
    assert len(counts) == 7
    assert sum(counts) == 256
    assert sum(counts[4:]) == 56


def test_wins_that_length_explains_are_doubted(finished_run: Callable) -> None:
    run = finished_run()
    wins = {"win_rate": 0.8, "win_rate_low": 0.75, "win_rate_high": 0.85}
    alike = {"win_rate_similar_length": 0.45, "similar_length_share": 0.125}
    lengths = {"greedy_length": 41.5, "reference_greedy_length": 20.25}
    run.change_evaluation("iter_003", **wins, **alike, **lengths)
    _, summary, _ = run.report()
    said = " ".join(summary.split())
    assert "it wins 80.0% against the supervised policy, but 45.0% where the responses" in said
    assert "which 12.5% are (mean 41.50 tokens, before 20.25)" in said
    run.change_evaluation("iter_003", win_rate_similar_length=0.7)
    assert "favour length" not in run.report()[1]
    run.change_evaluation("iter_003", win_rate_similar_length=0.45, win_rate_low=0.49)
    assert "favour length" not in run.report()[1]


def test_a_table_of_an_older_kind_is_named(finished_run: Callable) -> None:
    run = finished_run()
    path = run.inputs["evaluations"] / "iter_002" / folder.GREEDY
    pq.write_table(pq.read_table(path).drop_columns(["length"]), path)
    with pytest.raises(StageError, match=r"iter_002/samples.parquet has no column 'length'"):
        run.report()
