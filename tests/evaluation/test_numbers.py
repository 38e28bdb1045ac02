"""Every published number of two small policies, worked out by hand; and what leaves them be."""

import json
import random

import pytest

from stages.context import StageError
from stages.evaluation import folder, measures, tasks
from stages.evaluation.contest import contest, is_similar, outcome
from tests.evaluation.cases import POLICY, REFERENCE, answer, answered


def test_accuracy_is_of_what_can_be_judged():
    """a, c and f of a, b, c, d, f are right; of their 15 samples 1, 1, 3, 1 and 0."""
    numbers = measures.quality(POLICY)
    assert numbers["accuracy"] == pytest.approx(3 / 5)
    assert numbers["accuracy_sampled"] == pytest.approx(6 / 15)
    # Wilson for 3 of 5, with z² = 3.841459: 0.556552 ± 0.325827.
    assert (numbers["accuracy_low"], numbers["accuracy_high"]) == pytest.approx(
        (0.230724, 0.882379), abs=1e-6
    )


def test_pass_at_k_is_a_mean_over_prompts():
    """Right of 3: 1, 1, 3, 1, 0. pass@2 of one in three is 2/3."""
    numbers = measures.by_chances(POLICY, [1, 2, 3])
    assert numbers["pass_at_1"] == pytest.approx((1 / 3 + 1 / 3 + 1 + 1 / 3 + 0) / 5)
    assert numbers["pass_at_2"] == pytest.approx((2 / 3 + 2 / 3 + 1 + 2 / 3 + 0) / 5)
    assert numbers["pass_at_3"] == pytest.approx(4 / 5)


def test_votes_are_a_mean_over_prompts():
    """a: 5 wins, wrong. b: a tie of three, one right. c, d: right, in d alone. f: all abstain."""
    assert measures.by_vote(POLICY)["majority_vote"] == pytest.approx((0 + 1 / 3 + 1 + 1) / 5)


def test_win_rates_by_hand():
    found = contest(POLICY, REFERENCE)
    assert found.won == (1.0, 0.0, 0.5, 1.0, 1.0, 0.5)
    assert found.is_similar == (True, True, False, False, True, True)
    # All nine pairs: a 1, 2, 3 against 2, 2, 2; c 1, 1.5, 2.5 against 1, 1.5, 2, the first two of
    # which are the same responses; e 4, 4, 6 against 4, 5, 7.
    assert found.won_sampled == pytest.approx(
        (4.5 / 9, (6 * 0.5 + 3) / 9, (0.5 + 1.5 + 3) / 9, 3 / 9, (1 + 2) / 9, 0.0)
    )
    numbers = measures.against(POLICY, found)
    assert numbers["win_rate"] == pytest.approx(4 / 6)
    assert numbers["win_rate_sampled"] == pytest.approx((4.5 + 6 + 5 + 3 + 3) / 54)
    assert numbers["win_rate_similar_length"] == pytest.approx((1 + 0 + 1 + 0.5) / 4)
    assert numbers["similar_length_share"] == pytest.approx(4 / 6)
    assert numbers["greedy_length"] == pytest.approx((10 + 8 + 20 + 7 + 30 + 10) / 6)
    assert numbers["reference_greedy_length"] == pytest.approx((8 + 8 + 15 + 10 + 29 + 10) / 6)
    assert (numbers["win_rate_low"], numbers["win_rate_high"]) == pytest.approx(
        (0.299993, 0.903229), abs=1e-6
    )


def test_who_wins_loses_the_other_way_round():
    forth, back = contest(POLICY, REFERENCE), contest(REFERENCE, POLICY)
    assert [a + b for a, b in zip(forth.won, back.won, strict=True)] == [1.0] * 6
    assert [
        a + b for a, b in zip(forth.won_sampled, back.won_sampled, strict=True)
    ] == pytest.approx([1.0] * 6)


def test_a_policy_ties_with_itself():
    numbers = measures.against(POLICY, contest(POLICY, POLICY))
    assert numbers["win_rate"] == numbers["win_rate_similar_length"] == 0.5
    assert numbers["win_rate_sampled"] == 0.5


def test_no_pair_of_similar_length_is_no_win_rate_of_nothing():
    mine, theirs = (answered("a", answer(1.0, length=n), answer(1.0)) for n in (10, 30))
    numbers = measures.against([mine], contest([mine], [theirs]))
    assert numbers["similar_length_share"] == 0.0
    assert "win_rate_similar_length" not in numbers


@pytest.mark.parametrize(
    ("one", "other", "similar"),
    [(100, 80, True), (80, 100, True), (100, 79, False), (125, 100, True), (126, 100, False)],
)
def test_lengths_are_similar_within_a_fifth_of_the_longer(one, other, similar):
    assert is_similar(one, other) is similar


def test_the_same_response_that_was_cut_is_another():
    cut, ended = answer(0.0, text="same", ended=False), answer(1.0, text="same")
    assert outcome(ended, cut) == 1.0


def test_rewards_tie_as_they_are_on_disk(tmp_path):
    """0.1 has no exact binary form: what was read back is of single precision, and so is ours."""
    mine, theirs = (answered("a", answer(0.1, text=text), answer(0.1)) for text in "xy")
    folder.write(tmp_path / "theirs", [theirs], None, [])
    assert contest([mine], folder.read(tmp_path / "theirs")).won == (0.5,)


def test_other_prompts_are_refused():
    with pytest.raises(ValueError, match="different prompts"):
        contest(POLICY, REFERENCE[:-1])
    with pytest.raises(ValueError, match="different prompts"):
        contest(POLICY, [*REFERENCE[1:], REFERENCE[0]])


def test_nothing_that_can_be_judged_is_no_accuracy():
    unjudged = [answered(name, answer(1.0), answer(2.0), expected=None) for name in "ab"]
    assert measures.quality(unjudged) == {}
    assert measures.by_chances(unjudged, [1]) == measures.by_vote(unjudged) == {}
    assert measures.against(unjudged, contest(unjudged, unjudged))["win_rate"] == 0.5


def test_each_task_has_its_own_numbers():
    sums, words, other = tasks.breakdown(POLICY, contest(POLICY, REFERENCE))
    assert (sums["task"], words["task"], other["task"]) == ("sums", "words", None)
    assert [row["num_prompts"] for row in (sums, words, other)] == [3, 2, 1]
    assert [row["num_judged"] for row in (sums, words, other)] == [3, 1, 1]
    assert [row["accuracy"] for row in (sums, words, other)] == pytest.approx([2 / 3, 0, 1])
    assert [row["accuracy_sampled"] for row in (sums, words, other)] == pytest.approx(
        [5 / 9, 1 / 3, 0]
    )
    assert [row["win_rate"] for row in (sums, words, other)] == pytest.approx([1.5 / 3, 1, 0.5])
    assert [row["reward_mean"] for row in (sums, words, other)] == pytest.approx(
        [12 / 9, 15 / 6, 0]
    )
    assert sums["response_length"] == 10
    assert (sums["accuracy_low"], sums["accuracy_high"]) == pytest.approx(
        (0.207660, 0.938508), abs=1e-6
    )


def test_tasks_add_up_to_the_whole():
    rows = tasks.breakdown(POLICY, contest(POLICY, REFERENCE))
    judged = [row for row in rows if row["num_judged"]]
    right = sum(row["accuracy"] * row["num_judged"] for row in judged)
    assert right / sum(row["num_judged"] for row in judged) == pytest.approx(
        measures.quality(POLICY)["accuracy"]
    )
    won = sum(row["win_rate"] * row["num_prompts"] for row in rows) / 6
    assert won == pytest.approx(measures.against(POLICY, contest(POLICY, REFERENCE))["win_rate"])


def test_without_tasks_there_is_no_table():
    plain = [answered("a", answer(1.0, True), answer(1.0, True))]
    assert tasks.breakdown(plain, None) == []
    assert tasks.task_metrics([], 5) == {}


def test_only_the_largest_tasks_become_metrics():
    names = ["a"] * 3 + ["b"] * 2 + ["c"] * 2 + ["d"]
    some = [
        answered(str(place), answer(1.0, name != "b"), answer(1.0, True), task=name)
        for place, name in enumerate(names)
    ]
    random.Random(3).shuffle(some)
    rows = tasks.breakdown(some, contest(some, some))
    assert tasks.task_metrics(rows, 2) == {
        "accuracy/a": 1.0,
        "win_rate/a": 0.5,
        "accuracy/b": 0.0,
        "win_rate/b": 0.5,
    }
    assert len(tasks.task_metrics(rows, 99)) == 8
    assert tasks.task_metrics(rows, 0) == {}


def test_the_prompts_without_a_task_become_no_metric():
    found = tasks.task_metrics(tasks.breakdown(POLICY, None), 99)
    assert found == {"accuracy/sums": pytest.approx(2 / 3), "accuracy/words": 0.0}


@pytest.mark.parametrize("task", ["sums", "2-digit", "word problems", "a.b", "_x"])
def test_a_plain_name_stays_as_it_is(task):
    assert tasks.metric_name(task) == task


@pytest.mark.parametrize("task", ["a/b", "a:b", "..", ".", "größe", "x" * 80, " a", "a\nb", "a,b"])
def test_an_odd_name_becomes_one_that_trackers_take(task):
    from mlflow.utils.validation import _validate_metric_name

    name = tasks.metric_name(task)
    _validate_metric_name(f"accuracy/{name}")
    assert "/" not in name
    assert len(name) <= 64


def test_names_that_look_alike_stay_apart():
    names = ["a/b", "a:b", "a_b", "a?b", "x" * 80, "x" * 81]
    assert len({tasks.metric_name(name) for name in names}) == len(names)


def row(**extra):
    return {"prompt_id": "p1", "prompt": "2+2=", "extra": json.dumps(extra)}


def test_a_task_is_that_of_the_source_row():
    assert tasks.task_of(row(task="sums", other=3)) == "sums"
    assert tasks.task_of(row(other=3)) is None
    assert tasks.task_of(row(task=None)) is None


@pytest.mark.parametrize("task", [3, "", ["a"], {"a": 1}, True])
def test_a_task_that_is_no_text_is_refused_with_its_prompt(task):
    with pytest.raises(StageError, match=r"prompt p1 \('2\+2='\) has the task"):
        tasks.task_of(row(task=task))


def test_what_is_written_is_what_is_read(tmp_path):
    found = contest(POLICY, REFERENCE)
    folder.write(tmp_path / "e", POLICY, found, tasks.breakdown(POLICY, found))
    assert folder.read(tmp_path / "e") == POLICY
    again = tmp_path / "again"
    folder.write(again, folder.read(tmp_path / "e"), found, tasks.breakdown(POLICY, found))
    for name in (folder.GREEDY, folder.SAMPLED, folder.TASKS):
        assert (again / name).read_bytes() == (tmp_path / "e" / name).read_bytes()


def test_the_table_stands_beside_the_reference():
    rows = folder.greedy_rows(POLICY, contest(POLICY, REFERENCE))
    assert [row["reference_reward"] for row in rows] == pytest.approx([1, 0.5, 1, 0, 4, 1])
    assert [row["won"] for row in rows] == [1.0, 0.0, 0.5, 1.0, 1.0, 0.5]
    assert [row["pass_rate"] for row in rows] == pytest.approx(
        [1 / 3, 1 / 3, 1, 1 / 3, None, 0], nan_ok=True
    )
    assert {row["won"] for row in folder.greedy_rows(POLICY, None)} == {None}
