"""prepare: what it makes, and what it refuses."""

import json

import pytest

from stages.context import StageError
from stages.data.arithmetic import Problem, Slip, possible_slips, unordered_problems, worked
from stages.data.tokenizer import Decoder
from stages.rewards.verifier import Verifier

FILES = {
    "demonstrations": [{"prompt": "ab", "completion": "ba"}, {"prompt": "cd", "completion": "dc"}],
    "preferences": [{"prompt": "ab", "chosen": "ba", "rejected": "ab"}],
    "prompts": [{"prompt": "ef", "answer": "fe"}, {"prompt": "gh"}],
    "held_out": [{"prompt": "ij", "answer": "ji"}],
    "held_out_preferences": [{"prompt": "ij", "chosen": "ji", "rejected": "ij"}],
}


def write_files(folder, **replaced):
    for name, rows in {**FILES, **replaced}.items():
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)


def test_the_working_of_an_addition_is_written_out_column_by_column():
    assert worked(Problem(38, 47)) == "8+7=15;3+4=7+1=8;85"
    assert worked(Problem(7, 45)) == "7+5=12;0+4=4+1=5;52"
    assert worked(Problem(99, 99)) == "9+9=18;9+9=18+1=19;198"
    assert worked(Problem(38, 47), Slip.FORGOTTEN_CARRY) == "8+7=15;3+4=7;75"


@pytest.mark.parametrize("seed", range(3))
def test_every_slip_gives_a_wrong_answer_and_every_other_working_a_right_one(seed):
    rule = Verifier(after=";")
    for problem in unordered_problems(2)[:: 97 + seed]:
        assert rule.reward(worked(problem), problem.answer) == 1.0
        for slip in possible_slips(problem):
            assert rule.reward(worked(problem, slip, seed), problem.answer) == 0.0, (problem, slip)


def test_held_out_problems_are_in_no_training_set_in_either_order(runner):
    """With so few problems that any leak would show: the training sets use up all the others."""
    counts = {"demonstrations": 400, "preferences": 400, "prompts": 43, "held_out": 12}
    run = runner(prepare={"digits": 1, **counts})
    run.run("prepare")

    def problems(name):
        return {frozenset(row["prompt"][:-1].split("+")) for row in run.rows(f"data/{name}")}

    held_out = problems("held_out") | problems("held_out_preferences")
    assert len(held_out) == 12
    assert len(problems("demonstrations")) == 43
    for name in ("demonstrations", "preferences", "prompts"):
        assert not held_out & problems(name)


def test_token_ids_decode_to_the_text_they_came_from(trained):
    decoder = Decoder(trained.root / "artifacts/base")
    for row in trained.rows("data/demonstrations")[:10]:
        assert decoder.text(row["prompt_ids"]) == row["prompt"]
        assert decoder.text(row["completion_ids"]) == row["completion"]


def test_the_counts_are_those_asked_for_and_demonstrations_are_of_mixed_quality(trained):
    metrics = trained.metrics["prepare"]
    assert (metrics["num_demonstrations"], metrics["num_prompts"]) == (96, 40)
    assert 0.4 < metrics["demonstration_accuracy"] < 0.9


def test_the_verifier_measures_itself_on_the_held_out_pairs(trained):
    quality = json.loads((trained.root / "artifacts/rewards/verifier/quality.json").read_text())
    assert quality["pairwise_accuracy"] == 1.0


def test_a_users_files_become_the_same_artifacts(runner):
    run = runner(prepare={"source": "files"})
    write_files(run.root / "data")
    metrics = run.run("prepare")
    assert metrics["num_demonstrations"] == 2
    assert [row["answer"] for row in run.rows("data/held_out")] == ["ji"]
    assert {row["prompt"]: row["answer"] for row in run.rows("data/prompts")} == {
        "ef": "fe",
        "gh": None,
    }


def test_other_columns_are_kept_as_one_json_object_and_rollouts_carry_them(runner):
    extra = {"task": "turn round", "cases": [{"in": "é", "out": 1}], "answer_type": None}
    run = runner(prepare={"source": "files"}, rollout={"prompts": 2, "samples": 2})
    prompts = [{"prompt": "ef", "answer": "fe", **extra}, {"prompt": "gh"}]
    write_files(run.root / "data", prompts=prompts)
    run.run("prepare")
    text = '{"answer_type":null,"cases":[{"in":"é","out":1}],"task":"turn round"}'
    expected = {"ef": text, "gh": "{}"}
    assert {row["prompt"]: row["extra"] for row in run.rows("data/prompts")} == expected
    for stage in ("sft", "rollout@iter_001"):
        run.run(stage)
    assert {row["prompt"]: row["extra"] for row in run.rows("rollouts/iter_001")} == expected


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"demonstrations": ""}, r"demonstrations\.jsonl is empty"),
        ({"prompts": '{"prompt": "ef"}\n{oops\n'}, r"prompts\.jsonl line 2: it is not JSON"),
        ({"prompts": '["ef"]\n'}, r"prompts\.jsonl line 1: it is not a JSON object"),
        (
            {"preferences": [FILES["preferences"][0], {"prompt": "x", "chosen": "y"}]},
            r"preferences\.jsonl line 2: there is no 'rejected'",
        ),
        ({"held_out": [{"prompt": "ij", "answer": [5]}]}, r"line 1: 'answer' is list: write text"),
        ({"prompts": [{"prompt": ""}]}, r"prompts\.jsonl line 1: the prompt is empty"),
        ({"prompts": [{"prompt": "e" * 60}]}, r"prompts\.jsonl line 1.* 61 tokens .*max_length 48"),
        (
            {"demonstrations": [{"prompt": "ab", "completion": "b" * 50}]},
            r"demonstrations\.jsonl line 1.* 54 tokens together.*max_length 48",
        ),
        (
            {"prompts": [{"prompt": "ef"}, {"prompt": "ij"}]},
            r"held_out\.jsonl line 1 holds out the prompt of prompts\.jsonl line 2",
        ),
        (
            {"feedback": [{"prompt": "ab", "completion": "b", "rating": "good"}]},
            r"feedback\.jsonl line 1: 'rating' is str: write a number, true or false",
        ),
        (
            {"feedback": '{"prompt": "ab", "completion": "b", "rating": NaN}\n'},
            r"feedback\.jsonl line 1: 'rating' is float: write a number, true or false",
        ),
        (
            {"feedback": [{"prompt": "ij", "completion": "b", "rating": 1}]},
            r"held_out\.jsonl line 1 holds out the prompt of feedback\.jsonl line 1",
        ),
        (
            {"steps": [{"prompt": "ab", "steps": ["b", "c"], "labels": [1]}]},
            r"steps\.jsonl line 1: there are 2 steps and 1 labels",
        ),
        (
            {"steps": [{"prompt": "ab", "steps": "b", "labels": [1]}]},
            r"steps\.jsonl line 1: 'steps' is text that is not JSON",
        ),
        (
            {"steps": [{"prompt": "ab", "steps": ["b"], "labels": [2]}]},
            r"steps\.jsonl line 1: a label is 1 or true",
        ),
    ],
)
def test_a_bad_file_is_named_with_its_line(runner, replaced, message):
    strict = {"contamination": "refuse", "too_long": "refuse"}
    run = runner(prepare={"source": "files", **strict})
    write_files(run.root / "data", **replaced)
    with pytest.raises(StageError, match=message):
        run.run("prepare")


def test_a_folder_without_data_is_refused_with_the_names_that_it_might_have(runner):
    run = runner(prepare={"source": "files"})
    with pytest.raises(StageError, match=r"has no data: .*demonstrations\.\*, preferences\.\*"):
        run.run("prepare")
    (run.root / "data/demonstration.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(StageError, match=r"reads: demonstration\.jsonl .*demonstrations\.\*"):
        run.run("prepare")


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer"),
        ("model.safetensors", "no .*weights"),
    ],
)
def test_a_base_model_folder_without_a_needed_part_is_refused(trained, runner, removed, message):
    run = runner(model={"source": "folder"})
    for path in (trained.root / "artifacts/base").iterdir():
        if path.name != removed:
            (run.root / "models" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(StageError, match=message):
        run.run("prepare")


def test_a_base_model_folder_is_taken_with_its_tokenizer(trained, runner):
    run = runner(model={"source": "folder"})
    for path in (trained.root / "artifacts/base").iterdir():
        (run.root / "models" / path.name).write_bytes(path.read_bytes())
    run.run("prepare")
    assert run.rows("data/prompts") == trained.rows("data/prompts")


def test_more_prompts_than_problems_are_refused(runner):
    run = runner(prepare={"digits": 1, "held_out": 5, "prompts": 200})
    with pytest.raises(StageError, match=r"prepare\.prompts is 200"):
        run.run("prepare")


def test_pairs_are_feedback_too_and_a_file_of_feedback_stands_in_for_them(runner):
    run = runner(prepare={"source": "files"})
    write_files(run.root / "data")
    run.run("prepare")
    rated = [(row["completion"], row["rating"]) for row in run.rows("data/feedback")]
    assert rated == [("ba", 1.0), ("ab", 0.0)]
    assert run.rows("data/steps") == []

    other = runner("other", prepare={"source": "files"})
    feedback = [
        {"prompt": "ab", "completion": "ba", "rating": True},
        {"prompt": "cd", "completion": "cc", "rating": -0.5},
    ]
    write_files(other.root / "data", feedback=feedback)
    other.run("prepare")
    assert [row["rating"] for row in other.rows("data/feedback")] == [1.0, -0.5]


def test_steps_end_where_their_last_token_is(runner):
    run = runner(prepare={"source": "files"})
    write_files(
        run.root / "data",
        steps=[{"prompt": "ab", "steps": ["a;", "bb;", "a"], "labels": [1, False, 0.5]}],
    )
    run.run("prepare")
    [row] = run.rows("data/steps")
    assert row["step_ends"] == [1, 4, 6]  # the last step ends with the response, at its end token
    assert len(row["completion_ids"]) == 7
    assert row["step_labels"] == [1.0, 0.0, 0.5]
    separator = row["completion_ids"][1]
    assert row["completion_ids"][4] == separator


def test_the_steps_of_a_slip_are_wrong_from_where_it_shows(runner):
    run = runner()
    run.run("prepare")
    rows = run.rows("data/steps")
    right = [row for row in rows if all(row["step_labels"])]
    assert len(rows) == 2 * 64
    assert len(right) == 64
    assert all(row["step_labels"][-1] == 0 for row in rows if row not in right)
