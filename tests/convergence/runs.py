"""A tiny project on disk, and the loop of rollout, scores and update that a policy learns by."""

import itertools
import json
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.data import schema
from stages.data.artifacts import read_parquet, write_parquet
from stages.data.batching import Batch, collate
from stages.engines.forward import inference
from stages.engines.models.folders import load_policy
from tests.stages.conftest import Runner

Row = Mapping[str, Any]
Reward = Callable[[Row], float]

WORD = "dab"
"""The word to be found."""
START = "artifacts/policies/sft/model"
SEEDS = (1, 2, 3)


def typical(quality: Callable[[int], float], bar: float) -> float:
    """The median over SEEDS of what a run with a seed comes to.

    A run goes another way on a machine that rounds otherwise, and one in many fails to learn, or
    learns by chance. The last seed is not run where the others lie on the same side of the bar.
    """
    *first, last = SEEDS
    qualities = [quality(seed) for seed in first]
    if min(qualities) <= bar <= max(qualities):
        qualities.append(quality(last))
    return statistics.median(qualities)


def prepared(root: Path, files: Mapping[str, Sequence[Row]], **params: dict[str, Any]) -> Runner:
    """A run from JSON lines up to its SFT policy."""
    runner = Runner(root, prepare={"source": "files", "duplicates": "keep"}, **params)
    write_data(runner, files)
    runner.run("prepare")
    runner.run("sft")
    return runner


def write_data(runner: Runner, files: Mapping[str, Sequence[Row]]) -> None:
    for name, rows in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (runner.root / f"data/{name}.jsonl").write_text(lines)


def continued(start: Runner, root: Path, **params: Any) -> Runner:
    """A copy of a run, to go on from under these params."""
    runner = Runner(root, prepare={"source": "files", "duplicates": "keep"}, **params)
    shutil.copytree(start.root / "artifacts", root / "artifacts")
    return runner


def line_of_policies(num_updates: int) -> dict[str, dict[str, str]]:
    """Iterations, each from the one before; the last one only measures its parent's samples."""
    names = ["sft", *(f"iter_{number:03}" for number in range(1, num_updates + 2))]
    return {name: {"policy": parent} for parent, name in itertools.pairwise(names)}


def iterate(runner: Runner, reward: Reward) -> int:
    """Update the policy iteration after iteration; the number of optimizer steps."""
    *updates, last = runner.params.rl.iterations
    num_steps = 0
    for key in updates:
        runner.run(f"rollout@{key}")
        write_scores(runner, key, reward)
        address = f"policy_update@{key}"
        context = runner.context(address, micro_tokens=32768)
        num_steps += runner.run(address, context)["num_steps"]
    runner.run(f"rollout@{last}")
    return num_steps


def before_and_after(runner: Runner, quality: Reward) -> tuple[float, float]:
    """The mean quality of what the first policy sampled, and the last."""
    keys = list(runner.params.rl.iterations)
    first, last = (
        statistics.fmean(
            quality(row)
            for row in read_parquet(outs["rollouts"], schema.RolloutRow)
            if not row["greedy"]
        )
        for _, outs in (runner.paths(f"rollout@{key}") for key in (keys[0], keys[-1]))
    )
    return first, last


def write_scores(runner: Runner, key: str, reward: Reward) -> None:
    """The scores of an iteration, as the score stage writes them but by a reward of the test's."""
    inputs, outs = runner.paths(f"score@{key}")
    rollouts = read_parquet(inputs["rollouts"], schema.RolloutRow)
    temperature = runner.params.rollout.temperature
    references: Sequence[list[float] | None] = [None] * len(rollouts)
    if runner.params.score.reference:
        references = logprobs_by(runner, inputs["reference"], rollouts, temperature)
    rows = [
        {
            "prompt_id": row["prompt_id"],
            "sample_index": row["sample_index"],
            "reward": reward(row),
            "by_source": [],
            "ref_logprobs": logprobs,
        }
        for row, logprobs in zip(rollouts, references, strict=True)
    ]
    outs["scores"].parent.mkdir(parents=True, exist_ok=True)
    write_parquet(outs["scores"], rows, schema.ScoreRow)


def logprobs_by(
    runner: Runner, folder: Path, rows: Sequence[Row], temperature: float = 1.0
) -> list[list[float]]:
    """What the policy in a folder says of each response, token by token."""
    ctx = runner.context("evaluate_sft", micro_tokens=32768)
    policy = inference.logprobs_by("policy", lambda: load_policy(folder), temperature)
    return inference.over_responses(ctx, rows, policy)


def letters_right(row: Row) -> float:
    """The share of a response's letters that are those of WORD."""
    said = row["response"]
    return sum(a == b for a, b in zip(said, WORD, strict=False)) / max(len(said), len(WORD))


def collate_one_off(*arguments: Any, **options: Any) -> Batch:
    """Batches that look for each token's prediction at the token itself."""
    batch = collate(*arguments, **options)
    late = replace(batch.packed, predicting=batch.packed.predicting + 1)
    return replace(batch, packed=late)
