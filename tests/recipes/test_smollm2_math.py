"""The recipe of SmolLM2 and arithmetic: its problems are right, and it runs with a tiny model."""

import importlib.util
import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.config.presets import load_presets
from tests.models.gguf_files import tiny_llama, write_gguf
from tests.stages.conftest import Runner

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes/smollm2-math"
STAGES = (
    "prepare",
    "sft",
    "reward_source@right",
    "evaluate_sft",
    "online@grpo",
    "evaluate_online@grpo",
)
# What the words ask for, worked out by a table of its own.
ASKED = {
    "gets": lambda a, b: a + b,
    "finds": lambda a, b: a + b,
    "gives": lambda a, b: a - b,
    "loses": lambda a, b: a - b,
    "box": lambda a, b: a * b,
    "buys": lambda a, b: a * b,
    "walks": lambda a, b: a * b,
    "shares": lambda a, b: a // b,
}


@pytest.fixture(scope="module")
def problems():
    spec = importlib.util.spec_from_file_location("problems", RECIPE / "problems.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def solved(prompt: str) -> int:
    first, second = (int(number) for number in re.findall(r"\d+", prompt))
    word = next((word for word in ASKED if re.search(rf"\b{word}\b", prompt)), None)
    return ASKED[word](first, second) if word else first + second


def numbers_of(prompt: str) -> tuple[int, ...]:
    first, second = (int(number) for number in re.findall(r"\d+", prompt))
    return tuple(sorted((second, first // second) if "shares" in prompt else (first, second)))


def test_every_answer_is_right_and_no_numbers_are_on_both_sides(problems, tmp_path):
    problems.write(tmp_path, prompts=3000, held_out=300, seed=5)
    sides = {}
    for name, count in (("prompts", 3000), ("held_out", 300)):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len({row["prompt"] for row in rows}) == count
        assert {row["task"] for row in rows} == {"add1", "add2", "word", "one_step"}
        for row in rows:
            assert row["answer"] == str(solved(row["prompt"])), row
        sides[name] = {numbers_of(row["prompt"]) for row in rows}
    assert not sides["prompts"] & sides["held_out"]


def test_more_problems_than_there_are_is_said(problems, monkeypatch):
    monkeypatch.setattr(problems, "PATIENCE", 100)
    with pytest.raises(ValueError, match=r"there are hardly more than \d+ problems, not 100000"):
        list(problems.problems(100_000, held_out=True, seed=5))


def test_the_recipe_runs_with_a_tiny_model(problems, tmp_path):
    (preset,) = load_presets(ROOT, ["smollm2-math"])
    params = {**preset.params, "evaluate": {**preset.params["evaluate"], "samples": 2}}
    params["evaluate"]["pass_at"] = [1, 2]
    params["rl"] = {**params["rl"], "online": {"grpo": {"policy": "sft", "steps": 2}}}
    small = {"prompts": 4, "samples": 4, "max_new_tokens": 8, "batch_size": 16}
    params["rollout"] = {**params["rollout"], **small}
    runner = Runner(tmp_path / "run", **params)
    problems.write(runner.root / runner.params.prepare.folder, prompts=24, held_out=24, seed=1)
    model = tiny_llama(context=runner.params.model.max_length)
    write_gguf(runner.root / runner.params.model.folder / "tiny.gguf", model)

    metrics = {address: runner.run(address) for address in STAGES}
    assert metrics["prepare"]["num_prompts"] == 24
    assert metrics["prepare"]["num_dropped"] == 0
    after = metrics["evaluate_online@grpo"]
    assert after["num_prompts"] == 24
    assert {name for name in after if name.startswith("accuracy/")} == {
        f"accuracy/{task}" for task in ("add1", "add2", "word", "one_step")
    }
    rollouts = pq.read_table(runner.root / "artifacts/rollouts/grpo.parquet").to_pylist()
    assert len(rollouts) == 2 * 4 * 4
    assert all("task" in json.loads(row["extra"]) for row in rollouts)
    assert all(row["prompt_ids"][0] == 1 for row in rollouts), "the model's own chat template"
