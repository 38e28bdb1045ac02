"""The evaluation of real, tiny policies: its numbers are those of the tables that it leaves."""

import json
import shutil
import statistics

import pyarrow.parquet as pq
import pytest

from stages.context import StageError
from stages.data import schema
from stages.data.artifacts import read_parquet, write_parquet
from stages.data.tokenizer import Decoder
from stages.evaluation import folder
from stages.evaluation.estimates import pass_at_k

SFT, ITERATION = "evaluate_sft", "evaluate@iter_001"


def by_prompt(values):
    """Means of the two samples of each prompt."""
    return [(one + other) / 2 for one, other in zip(values[::2], values[1::2], strict=True)]


def table(runner, policy, name="samples"):
    return runner.rows(f"evaluations/{policy}/{name}")


def change_held_out(runner, change):
    path = runner.root / "artifacts/data/held_out.parquet"
    rows = read_parquet(path, schema.PromptRow)
    changed = [{**row, **change(index)} for index, row in enumerate(rows)]
    write_parquet(path, changed, schema.PromptRow)


def expect_what_it_says(runner):
    """Some prompts whose greedy response is right, some of whose sampled ones is: it knows none."""
    runner.run(SFT)
    greedy, sampled = table(runner, "sft"), table(runner, "sft", "sampled")
    shutil.rmtree(runner.root / "artifacts/evaluations")

    def answer(index):
        if greedy[index]["finish_reason"] == "stop":
            return {"answer": greedy[index]["response"].rsplit(";", 1)[-1]}
        return {"answer": sampled[2 * index]["vote"] or "nothing"} if index % 2 else {}

    change_held_out(runner, answer)


def give_policy(runner, source):
    """Call another policy iter_001, without having trained it."""
    shutil.copytree(
        runner.root / source, runner.root / "artifacts/policies/iter_001/model", dirs_exist_ok=True
    )


@pytest.mark.parametrize("reward", ["reward_model", "verifier"])
def test_the_numbers_are_those_of_the_tables(copied, reward):
    runner = copied(rl={"reward": reward}, rollout={"max_new_tokens": 28})
    expect_what_it_says(runner)
    metrics = runner.run(SFT)
    assert 0 < metrics["accuracy"] < 1
    assert 0 < metrics["pass_at_1"] < metrics["pass_at_2"] < 1
    assert 0 < metrics["majority_vote"] < 1
    greedy, sampled = table(runner, "sft"), table(runner, "sft", "sampled")
    assert [row["prompt_id"] for row in greedy] == sorted(row["prompt_id"] for row in greedy)
    assert len(sampled) == 2 * len(greedy) == 32
    assert metrics["accuracy"] == sum(row["correct"] for row in greedy) / 16
    assert metrics["accuracy_sampled"] == sum(row["correct"] for row in sampled) / 32
    assert metrics["pass_at_1"] == pytest.approx(metrics["accuracy_sampled"])
    right = [sum(row["correct"] for row in sampled[2 * i : 2 * i + 2]) for i in range(16)]
    assert metrics["pass_at_2"] == pytest.approx(sum(pass_at_k(2, c, 2) for c in right) / 16)
    assert [row["pass_rate"] for row in greedy] == [c / 2 for c in right]
    assert metrics["reward_mean"] == pytest.approx(sum(row["reward"] for row in sampled) / 32)
    of_prompts = by_prompt([row["reward"] for row in sampled])
    assert metrics["reward_mean_error"] == pytest.approx(statistics.stdev(of_prompts) / 4, rel=1e-4)
    assert metrics["kl_to_reference_error"] < 1e-4, "the reference itself"
    assert metrics["response_length"] == sum(row["length"] for row in sampled) / 32
    cut = [row["finish_reason"] == "length" for row in sampled]
    assert metrics["truncation_rate"] == sum(cut) / 32
    assert all(row["vote"] is None for row, is_cut in zip(sampled, cut, strict=True) if is_cut)
    assert metrics["num_prompts"] == metrics["num_judged"] == 16


def test_the_reference_is_compared_with_nobody(copied):
    runner = copied()
    metrics = runner.run(SFT)
    assert not [name for name in metrics if name.startswith("win_rate")]
    assert {(row["reference_reward"], row["won"]) for row in table(runner, "sft")} == {(None, None)}


def test_a_policy_that_is_the_reference_ties_with_it(copied):
    runner = copied()
    give_policy(runner, "artifacts/policies/sft/model")
    sft, same = runner.run(SFT), runner.run(ITERATION)
    assert same["win_rate"] == same["win_rate_sampled"] == same["win_rate_similar_length"] == 0.5
    assert same["similar_length_share"] == 1.0
    assert same["greedy_length"] == same["reference_greedy_length"]
    assert same["kl_to_reference"] == pytest.approx(0, abs=1e-5)
    assert {name: same[name] for name in sft} == sft


def test_a_policy_is_compared_with_the_references_responses(copied):
    runner = copied()
    give_policy(runner, "artifacts/base")
    runner.run(SFT)
    metrics = runner.run(ITERATION)
    mine, theirs = table(runner, "iter_001"), table(runner, "sft")
    won = []
    for one, other in zip(mine, theirs, strict=True):
        assert one["reference_reward"] == other["reward"]
        tie = one["response"] == other["response"] or one["reward"] == other["reward"]
        won.append(0.5 if tie else float(one["reward"] > other["reward"]))
    assert [row["won"] for row in mine] == won
    assert 0 < metrics["win_rate"] == sum(won) / 16 < 1
    assert metrics["win_rate_low"] < metrics["win_rate"] < metrics["win_rate_high"]
    sampled = (table(runner, policy, "sampled") for policy in ("iter_001", "sft"))
    gains = [one["reward"] - other["reward"] for one, other in zip(*sampled, strict=True)]
    assert metrics["reward_gain"] == pytest.approx(statistics.fmean(gains))
    error = statistics.stdev(by_prompt(gains)) / 4
    assert metrics["reward_gain_error"] == pytest.approx(error)
    assert metrics["kl_to_reference_error"] > 0
    assert metrics["reference_greedy_length"] == sum(row["length"] for row in theirs) / 16
    shown = json.loads((runner.root / f"jobs/{ITERATION}/tables/samples.json").read_text())
    assert [row["prompt"] for row in shown] == [row["prompt"] for row in theirs]
    assert [row["reference_response"] for row in shown] == [row["response"] for row in theirs]


def test_prompts_without_an_answer_leave_rewards_to_compare(copied):
    runner = copied()
    change_held_out(runner, lambda _: {"answer": None})
    give_policy(runner, "artifacts/base")
    runner.run(SFT)
    metrics = runner.run(ITERATION)
    assert not [name for name in metrics if name.startswith(("accuracy", "pass_at", "majority"))]
    assert metrics["num_judged"] == 0
    assert {"win_rate", "reward_mean", "kl_to_reference"} <= metrics.keys()
    assert {(row["correct"], row["pass_rate"]) for row in table(runner, "iter_001")} == {
        (None, None)
    }


def test_some_prompts_without_an_answer_do_not_count_as_wrong(copied):
    runner = copied(rollout={"max_new_tokens": 28})
    expect_what_it_says(runner)
    whole = runner.run(SFT)
    before = table(runner, "sft")
    shutil.rmtree(runner.root / "artifacts/evaluations")
    change_held_out(runner, lambda index: {"answer": None} if index % 2 else {})
    metrics = runner.run(SFT)
    assert metrics["num_judged"] == 8
    assert 0 < metrics["accuracy"] == sum(row["correct"] for row in before[::2]) / 8
    assert metrics["reward_mean"] == whole["reward_mean"]
    rights = [None if index % 2 else row["correct"] for index, row in enumerate(before)]
    assert [row["correct"] for row in table(runner, "sft")] == rights


@pytest.mark.parametrize("source", ["verifier", "sums"])
def test_a_reward_that_compares_needs_every_answer_and_says_so_at_once(copied, source):
    runner = copied(rl={"reward": source}, rewards={"sums": {"kind": "maths"}})
    runner.run("reward_source@sums")
    change_held_out(runner, lambda index: {"answer": None} if index in (3, 4) else {})
    shutil.rmtree(runner.root / "artifacts/policies/sft/model")  # nothing is generated
    wrong = rf"'.*=' has no 'answer' \(2 of 16 have none\), and rl.reward \({source}\) compares"
    with pytest.raises(StageError, match=wrong):
        runner.run(SFT)


def test_another_source_may_say_what_is_right(copied):
    """By a pattern that needs no answer: right is what has a digit after the last semicolon."""
    ends_with_digit = {"kind": "pattern", "pattern": "[0-9]$", "must_end": False}
    runner = copied(
        rewards={"digit": ends_with_digit}, evaluate={"correct": "digit", "correct_at": 1.0}
    )
    runner.run("reward_source@digit")
    change_held_out(runner, lambda index: {"answer": None} if index % 2 else {})
    metrics = runner.run(SFT)
    greedy, sampled = table(runner, "sft"), table(runner, "sft", "sampled")
    for row in (*greedy, *sampled):
        assert row["correct"] == row["response"][-1:].isdigit()
    assert metrics["num_judged"] == 16
    assert 0 < metrics["accuracy_sampled"] < 1
    assert "majority_vote" not in metrics
    assert {row["vote"] for row in sampled} == {None}


def test_a_source_that_compares_leaves_prompts_without_an_answer_out(copied):
    runner = copied(rewards={"sums": {"kind": "maths"}}, evaluate={"correct": "sums"})
    runner.run("reward_source@sums")
    change_held_out(runner, lambda index: {"answer": None} if index % 2 else {})
    assert runner.run(SFT)["num_judged"] == 8
    rights = [row["correct"] for row in table(runner, "sft")]
    assert [right is None for right in rights] == [index % 2 == 1 for index in range(16)]


def test_what_is_right_may_be_a_reward_that_is_high_enough(copied):
    runner = copied(evaluate={"correct": "reward_model", "correct_at": -4.0})
    ctx = runner.context(SFT, parts={})
    metrics = runner.run(SFT, ctx)
    greedy = table(runner, "sft")
    assert [row["correct"] for row in greedy] == [row["reward"] >= -4.0 for row in greedy]
    assert metrics["accuracy"] == sum(row["reward"] >= -4.0 for row in greedy) / 16
    passes = {path.parent.name.split("-")[0] for path in ctx.parts}
    assert "rewards" in passes
    assert "correctness" not in passes, "the reward model is asked once"


def test_tasks_have_rows_and_the_largest_have_metrics(copied):
    runner = copied(evaluate={"task_metrics": 1}, rollout={"max_new_tokens": 28})
    expect_what_it_says(runner)
    names = ["small"] * 4 + ["large"] * 12
    change_held_out(runner, lambda i: {"extra": json.dumps({"task": names[i]})})
    metrics = runner.run(SFT)
    greedy = table(runner, "sft")
    large, small = table(runner, "sft", "tasks")
    assert (large["task"], small["task"]) == ("large", "small")
    assert large["num_prompts"] == 12
    of_large = [row for row in greedy if row["task"] == "large"]
    assert 0 < large["accuracy"] == sum(row["correct"] for row in of_large) / 12 < 1
    assert metrics["accuracy/large"] == large["accuracy"]
    assert "accuracy/small" not in metrics
    assert small["win_rate"] is None


def test_a_task_that_is_no_text_is_refused(copied):
    runner = copied()
    change_held_out(runner, lambda i: {"extra": '{"task": 7}'} if i == 5 else {})
    with pytest.raises(StageError, match="has the task 7: make `task`"):
        runner.run(SFT)


def test_an_evaluation_of_other_prompts_is_no_reference(copied):
    runner = copied()
    give_policy(runner, "artifacts/base")
    runner.run(SFT)
    path = runner.root / "artifacts/evaluations/sft" / folder.GREEDY
    pq.write_table(pq.read_table(path).slice(1), path)
    with pytest.raises(StageError, match="artifacts/evaluations/sft cannot be compared with"):
        runner.run(ITERATION)


ASKS_TWICE = """
from stages.environments.environment import Environment, Observation


class Twice(Environment):
    def reset(self, row, seed):
        self.turns = 0

    def step(self, action):
        self.turns += 1
        return Observation("1+1=", reward=len(action) / 8, done=self.turns == 2)
"""


def test_a_policy_that_acts_in_turns_is_evaluated_in_turns(copied):
    """Two turns, four tokens observed between them: they are no part of what was said."""
    runner = copied(
        rollout={
            "environment": "twice:Twice",
            "max_turns": 2,
            "max_new_tokens": 16,
            "max_observation_tokens": 8,
        },
        rewards={"paid": {"kind": "environment"}},
        rl={"reward": "paid"},
    )
    (runner.root / "environments/twice.py").write_text(ASKS_TWICE)
    runner.run("reward_source@paid")
    give_policy(runner, "artifacts/policies/sft/model")
    sft, same = runner.run(SFT), runner.run(ITERATION)
    assert 1 < sft["turns"] <= 2
    greedy, sampled = table(runner, "sft"), table(runner, "sft", "sampled")
    assert sft["environment_reward"] == pytest.approx(sum(row["reward"] for row in sampled) / 32)
    assert sft["response_length"] == sum(row["length"] for row in sampled) / 32
    assert max(row["length"] for row in (*greedy, *sampled)) <= 16
    assert any("1+1=" in row["response"] for row in sampled)
    assert same["win_rate"] == same["win_rate_sampled"] == 0.5
    assert same["kl_to_reference"] == pytest.approx(0, abs=1e-5)


def test_the_demo_reports_additions_with_a_carry_apart(copied):
    runner = copied()
    metrics = runner.run(SFT)
    for row in table(runner, "sft"):
        left, right = (int(number) for number in row["prompt"][:-1].split("+"))
        carries = max(left, right) >= 10 and left % 10 + right % 10 >= 10
        assert row["task"] == ("carry" if carries else "no_carry")
    assert {"accuracy/carry", "accuracy/no_carry"} <= metrics.keys()
    assert {row["extra"] for row in runner.rows("data/prompts")} == {"{}"}, (
        "what is trained on is as it was"
    )


def test_texts_of_many_are_those_of_each(trained):
    decoder = Decoder(trained.root / "artifacts/base")
    responses = [[], [5], [2, 5, 6, 2], list(range(12))]
    assert decoder.texts(responses) == [decoder.text(ids) for ids in responses]
