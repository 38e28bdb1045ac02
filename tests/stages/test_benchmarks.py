"""The benchmarks of engines run, at the smallest sizes and without peers."""

from pathlib import Path

import pytest
import torch

from benchmarks import artifacts, generation, memory, online, side_by_side, training
from benchmarks.workloads import make_model, rl_step


def test_generation_is_measured():
    words = ["--model", "tiny", "--requests", "4", "--slots", "4", "--new-tokens", "6"]
    found = generation.measure(generation.options_of([*words, "--rounds", "1"]))
    assert found["tokens"] == 4 * 6


@pytest.mark.parametrize("stage", training.STAGES)
def test_training_is_measured(stage, tmp_path):
    make_model("tiny", tmp_path / "model")
    options = training.options_of(["--model", "tiny", "--rows", "2", "--steps", "1"])
    found = training.measure(stage, tmp_path, options, padded=False)
    assert found["tokens_per_second"] > 0


@pytest.mark.parametrize("more", ["", "--in-memory --offload --checkpoint", "--in-memory --lora 2"])
def test_a_fused_step_is_measured(tmp_path, more):
    words = ["--model", "tiny", "--steps", "3", *more.split()]
    found = online.measure(online.options_of(words), tmp_path)
    assert found["num_new_tokens"] == rl_step("tiny").num_responses * rl_step("tiny").new_tokens
    assert 0 < found["optimizer_seconds"] < found["update_seconds"]


def test_memory_is_measured_for_every_kind_of_work():
    cells = list(memory.measured("tiny", [64], until=float("inf")))
    assert {cell["stage"] for cell in cells} == {
        "rollout",
        "score (log-probs)",
        "sft",
        "dpo",
        "policy_update",
        "reward_model",
    }


def test_ratios_are_held_against_the_targets_where_both_sides_have_a_number():
    parts = {
        "sft": {"tokens_per_second": 700, "mfu": 0.5, "share_of_matmul_rate": 0.61, "run": "now"},
        "trl_sft_padded": {"tokens_per_second": 100, "best_tokens_per_second": 200, "run": "now"},
        "trl_sft_packed": {"failed": "out of memory", "run": "now"},
        "online": {"steps_per_second": 0.5, "run": "now"},
        "trl_grpo": {"steps_per_second": 0.2, "run": "before"},
    }
    rows = {(row["theirs"], row["by"]): row for row in side_by_side.compared("1.1b", parts)}
    padded = rows["trl_sft_padded", "tokens_per_second"]
    assert (padded["times_as_fast"], padded["target"], padded["reached"]) == (7.0, 6.0, True)
    assert rows["trl_sft_padded", "best_tokens_per_second"]["reached"] is None
    assert rows["trl_grpo", "steps_per_second"]["reached"] is False
    assert not rows["trl_grpo", "steps_per_second"]["same_run"]
    assert rows["the GPU's peak on paper", "mfu"]["reached"] is False
    assert rows["a large matrix product here", "share_of_matmul_rate"]["reached"] is True
    assert not any(theirs == "trl_sft_packed" for theirs, _ in rows)


def test_a_part_that_takes_too_long_is_ended_and_said_to_have_failed(tmp_path):
    options = side_by_side.options_of(["--model", "tiny", "--folder", str(tmp_path)])
    found = side_by_side.in_a_process("sft", options, limit=0.2)
    assert "no result after 0.2 s" in found["failed"]
    assert not list(Path(tmp_path).iterdir())


def test_ranks_are_timed_as_they_write_hash_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "ROWS", 64)
    monkeypatch.setattr(artifacts, "WIDTH", 4096)
    tensors = {f"layer.{i}": torch.ones(64, 4096) for i in range(3)}
    parts = {"write", "hash", "write_and_hash", "read_from_page_cache"}
    for rates in artifacts.measure(tensors, 2, tmp_path, False):
        assert rates.keys() == parts
        assert min(rates.values()) > 0
    assert not list(tmp_path.iterdir())


def test_every_byte_is_hashed_by_some_thread_of_some_rank(monkeypatch):
    hashed = []

    class Noted(artifacts.NoHash):
        def update(self, data):
            hashed.append(bytes(data))

    monkeypatch.setattr(artifacts, "md5", Noted)
    tensors = [torch.full((2,), float(i)) for i in range(11)]
    for rank in range(2):
        artifacts.hash_share(tensors[rank::2])
    assert sorted(hashed) == sorted(tensor.numpy().tobytes() for tensor in tensors)
