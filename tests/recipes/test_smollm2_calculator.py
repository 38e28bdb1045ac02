"""The recipe of the calculator: its problems are right, and it runs with a tiny model."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from pipelines.config.presets import load_presets
from stages.environments.calculator import Calculator
from tests.models.gguf_files import tiny_llama, write_gguf
from tests.stages.conftest import Runner

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes/smollm2-calculator"
GSM8K = ROOT.parent / "shared/data"
STAGES = (
    "prepare",
    "sft",
    "reward_source@paid",
    "evaluate_sft",
    "online@grpo",
    "evaluate_online@grpo",
)
ASKED = {
    "finds": lambda a, b, c: a * b + c,
    "gives": lambda a, b, c: a * b - c,
    "sells": lambda a, b, c: (a + b) * c,
    "walks": lambda a, b, c: a * b + c,
}


@pytest.fixture(scope="module")
def problems():
    spec = importlib.util.spec_from_file_location("calculator_problems", RECIPE / "problems.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().split("\n")[:-1]]


def played(completion: str, answer: str) -> float:
    """What a policy is paid that says what a demonstration says, where it is to speak."""
    game = Calculator()
    game.reset({"answer": answer}, 0)
    said = completion
    while ")" in said:
        turn, _, said = said.partition(")")
        observed = game.step(turn + ")")
        assert not observed.done
        assert said.startswith(observed.text), "the demonstration has another result"
        said = said.removeprefix(observed.text)
    return game.step(said).reward


def test_every_problem_is_right_and_its_demonstration_is_paid(problems, tmp_path):
    sizes = {"demonstrations": 200, "prompts": 600, "held_out": 200}
    made = problems.roles(None, **sizes, seed=5)
    assert problems.write(tmp_path, made) == sizes
    numbers = {}
    for name in ("prompts", "held_out"):
        for row in read(tmp_path, name):
            question = row["prompt"].removesuffix(problems.HOW)
            a, b, c = map(int, re.findall(r"\d+", question))
            asked = next(ASKED[word] for word in ASKED if word in question)
            assert row["answer"] == str(asked(a, b, c)), row
            numbers.setdefault(name, set()).add(tuple(sorted((a, b, c))))
    assert not numbers["prompts"] & numbers["held_out"]
    shown = read(tmp_path, "demonstrations")
    assert not {row["prompt"] for row in shown} & {
        row["prompt"] for row in read(tmp_path, "prompts")
    }
    for row in shown:
        answer = row["completion"].split("\n")[-1]
        assert played(row["completion"], answer) == 1.0
        assert row["completion"].count("calc(") == 2


def gsm8k_row(question, answer):
    return {"question": question, "answer": answer, "final": answer.split("#### ")[1]}


def test_demonstrations_of_gsm8k_are_its_annotations(problems, tmp_path):
    rows = [
        gsm8k_row("One?", "It is 4*6=<<4*6=24>>24, so 24/5=$<<24/5=4.8>>4.8.\n#### 4.8"),
        gsm8k_row("Not in steps?", "It is 5.\n#### 5"),
        gsm8k_row("Parentheses?", "<<(4+6)*2=20>>20\n#### 20"),
        gsm8k_row("Wrong?", "<<4+6=11>>11\n#### 11"),
        gsm8k_row("Another end?", "<<4+6=10>>10 and one\n#### 11"),
    ]
    for name in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"gsm8k_{name}.jsonl").write_text(text)
    sizes = {"demonstrations": 3, "prompts": 9, "held_out": 9}
    counts = problems.write(tmp_path / "data", problems.roles(tmp_path, **sizes, seed=5))
    assert counts == {"demonstrations": 1, "prompts": 4, "held_out": 5}
    [shown] = read(tmp_path / "data", "demonstrations")
    assert shown["completion"] == "calc(4*6)24\ncalc(24/5)4.8\n4.8"
    with pytest.raises(SystemExit, match=r"gsm8k_train\.jsonl is missing"):
        problems.roles(tmp_path / "nowhere", **sizes, seed=5)


@pytest.mark.skipif(not (GSM8K / "gsm8k_train.jsonl").exists(), reason="the data are not here")
def test_the_real_gsm8k_is_read(problems, tmp_path):
    sizes = {"demonstrations": 100, "prompts": 7000, "held_out": 2000}
    counts = problems.write(tmp_path, problems.roles(GSM8K, **sizes, seed=5))
    assert counts == {"demonstrations": 100, "prompts": 7000, "held_out": 1319}
    for row in read(tmp_path, "demonstrations"):
        assert played(row["completion"], row["completion"].split("\n")[-1]) == 1.0


def test_what_the_readme_says_that_it_gains_is_what_was_recorded():
    recorded = json.loads((ROOT / "benchmarks/results/recipes.json").read_text())
    measured = recorded["smollm2-calculator"]["evaluations"]
    columns = (
        recorded["smollm2-calculator, the model as it came"]["evaluations"]["evaluate_sft"],
        measured["evaluate_sft"],
        measured["evaluate_online@grpo"],
    )
    readme = (RECIPE / "README.md").read_text()
    for row, metric in {
        "right, greedy": "accuracy",
        "right, sampled at temperature 1": "accuracy_sampled",
        "at least one of 4 samples right": "pass_at_4",
        "`plus_times`, greedy": "accuracy/plus_times",
        "`times_minus`, greedy": "accuracy/times_minus",
        "`times_plus`, greedy": "accuracy/times_plus",
        "episodes that used the calculator": "multi_turn_rate",
    }.items():
        (line,) = [line for line in readme.splitlines() if line.startswith(f"| {row} |")]
        came, *after = [column[metric] for column in columns]
        cells = [f"{came['mean']:.1%}", *(f"{v['mean']:.1%} ± {100 * v['std']:.1f}" for v in after)]
        cells = [cell.replace("%", " %") for cell in cells]
        assert [cell.strip(" *") for cell in line.strip("|").split("|")[1:]] == cells


def test_what_was_measured_is_the_recipe_that_is_shipped():
    """The learning rate and the batch size of SFT were chosen in the same run that measured."""
    recorded = json.loads((ROOT / "benchmarks/results/recipes.json").read_text())
    (preset,) = load_presets(ROOT, ["smollm2-calculator"])
    for change in recorded["smollm2-calculator"]["set"]:
        key, _, value = change.partition("=")
        section, name = key.split(".")
        assert preset.params[section][name] == float(value)


def test_the_recipe_runs_with_a_tiny_model(problems, tmp_path):
    """Scaled down: a model that knows nothing learns the form of a call, and the tool answers."""
    (preset,) = load_presets(ROOT, ["smollm2-calculator"])
    params = {**preset.params, "precision": "float32"}
    params["evaluate"] = {**params["evaluate"], "samples": 2, "pass_at": [1, 2]}
    params["rl"] = {**params["rl"], "online": {"grpo": {"policy": "sft", "steps": 2}}}
    params["sft"] = {"epochs": 25, "batch_size": 8, "learning_rate": 5e-3}
    small = {"prompts": 4, "samples": 4, "max_new_tokens": 48, "max_turns": 3, "batch_size": 16}
    params["rollout"] = {**params["rollout"], **small}
    runner = Runner(tmp_path / "run", **params)
    sizes = {"demonstrations": 16, "prompts": 16, "held_out": 8}
    data = runner.root / runner.params.prepare.folder
    problems.write(data, problems.roles(None, **sizes, seed=1))
    model = tiny_llama(context=runner.params.model.max_length)
    write_gguf(runner.root / runner.params.model.folder / "tiny.gguf", model)

    metrics = {address: runner.run(address) for address in STAGES}
    assert metrics["prepare"]["num_dropped"] == 0
    before, after = metrics["evaluate_sft"], metrics["evaluate_online@grpo"]
    assert before["multi_turn_rate"] > 0.5, "after SFT it calls the calculator"
    assert after["num_prompts"] == 8
    assert "multi_turn_rate" in after
    rollouts = runner.rows("rollouts/grpo")
    assert len(rollouts) == 2 * 4 * 4
    used = [row for row in rollouts if 0 in row["loss_mask"]]
    assert used
    for row in used:
        assert len(row["turn_ends"]) > 1
    shown = [row["response"] for row in runner.rows("evaluations/sft/samples")]
    assert any("environment: " in text for text in shown), shown
