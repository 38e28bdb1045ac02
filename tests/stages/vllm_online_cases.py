"""vLLM beside a learner, in a deterministic job. test_vllm.py runs it where vLLM is installed."""

import threading
import time
from contextlib import contextmanager

import pyarrow.parquet as pq
import pytest
import torch

from stages.context import StageError
from stages.contracts.precision import Precision
from stages.engines.generation.generator import GeneratorSettings
from stages.engines.generation.vllm_generator import VllmGenerator
from stages.engines.generation.vllm_process import ENGINE_APART
from stages.engines.processes import determinism
from tests.stages.test_generators import tiny_llama
from tests.stages.test_online import OVERLAP


@pytest.fixture(autouse=True, scope="module")
def _deterministic():
    determinism.before_import()
    determinism.after_import()


@contextmanager
def watched_modes():
    """Whether torch was seen to be deterministic, and whether it was not."""
    seen, over = set(), threading.Event()

    def watch():
        while not over.is_set():
            seen.add(torch.are_deterministic_algorithms_enabled())
            time.sleep(1e-3)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


def test_a_learner_is_deterministic_also_while_vllm_answers(runner):
    run = runner(
        # Its whole context would not fit the cache.
        model={"hidden_size": 128, "num_heads": 2, "num_layers": 4, "max_length": 2**19},
        rollout={"engine": "vllm", "temperature": 0.9},
        rl={
            "algorithm": "grpo",
            "reward": "verifier",
            "iterations": {},
            "online": {"fast": {"policy": "sft", "steps": 3}},
        },
        **OVERLAP,
    )
    for address in ("prepare", "sft"):
        run.run(address)
    with watched_modes() as seen:
        metrics = run.run("online@fast")
    assert seen == {True}
    assert 0 < metrics["logprob_gap_max"] < 1
    rows = pq.read_table(run.root / "artifacts/rollouts/fast.parquet").to_pylist()
    by = {step: {row["policy_hash"] for row in rows if row["step"] == step} for step in (1, 2, 3)}
    assert by[1] == by[2] != by[3], "sampled ahead, by the policy of the step before"


def test_an_engine_that_would_compute_in_this_process_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(ENGINE_APART, "0")
    with pytest.raises(StageError, match=f"{ENGINE_APART}=0 .* unset the variable"):
        VllmGenerator(tiny_llama(tmp_path), GeneratorSettings("cpu", Precision.FLOAT32, 4))
