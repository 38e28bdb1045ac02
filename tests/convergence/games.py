"""Policies that know how a game is played and not yet how it is won, and how often they win."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stages.contracts.precision import Precision
from stages.data.artifacts import read_parquet
from stages.data.schema import PromptRow
from stages.data.tokenizer import EOS, Decoder
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.sampling import sample_seed
from stages.engines.generation.torch_generator import TorchGenerator
from stages.environments.episodes import open_arena
from tests.convergence.conftest import SORTING
from tests.convergence.runs import continued, write_data
from tests.episodes import play_all
from tests.stages.conftest import Runner

SAMPLES = 4
"""Games that are played for each held-out prompt."""
Segment = tuple[str, bool]
"""What was said, and whether the policy said it; EOS ends a turn."""


def shown(
    root: Path,
    questions: Sequence[dict[str, str]],
    held_out: Sequence[dict[str, str]],
    episode: Callable[[dict[str, str]], list[Segment]],
    repeats: int,
    **params: Any,
) -> Runner:
    """A run up to a policy that was shown episodes, and learnt the policy's part of them."""
    runner = Runner(root, prepare={"source": "files"}, model=SORTING, **params)
    episodes = [(row, episode(row)) for row in questions for _ in range(repeats)]
    pair = {"prompt": questions[0]["prompt"], "chosen": "1", "rejected": "2"}
    files = {
        "demonstrations": [
            {"prompt": row["prompt"], "completion": text_of(of)} for row, of in episodes
        ],
        "preferences": [pair],
        "prompts": questions,
        "held_out": held_out,
        "held_out_preferences": [{**pair, "prompt": held_out[0]["prompt"]}],
    }
    write_data(runner, files)
    runner.run("prepare")
    decoder = Decoder(root / "artifacts/base")
    by_text = {(row["prompt"], text_of(of)): of for row, of in episodes}

    def with_mask(row: dict[str, Any]) -> dict[str, Any]:
        of = by_text[row["prompt"], row["completion"]]
        ids = [(i, said) for text, said in of for i in decoder.ids(text)]
        return {"completion_ids": [i for i, _ in ids], "loss_mask": [int(s) for _, s in ids]}

    runner.rewrite("data/demonstrations", with_mask)
    runner.run("sft")
    return runner


def text_of(episode: Sequence[Segment]) -> str:
    return "".join(text for text, _ in episode).replace(EOS, "")


def learnt(
    start: Runner, root: Path, seed: int, steps: int, rollout: dict[str, Any], rate: float
) -> Runner:
    """A copy of a run whose policy `fast` has learnt from what its environment pays."""
    runner = continued(
        start,
        root / str(seed),
        seed=seed,
        rewards={"game": {"kind": "environment"}},
        rl={
            "reward": "game",
            "algorithm": "rloo",
            "online": {"fast": {"policy": "sft", "steps": steps}},
        },
        rollout={"batch_size": 512, **rollout},
        # An episode that was cut is as bad as one that was lost, and no worse.
        score={"missing_eos_penalty": 0.0, "reference": False},
        model=SORTING,
        policy_update={
            "learning_rate": rate,
            "warmup_steps": 5,
            "epochs": 1,
            "batch_size": 128,
            "kl_coef": 0.0,
        },
    )
    runner.run("reward_source@game")
    runner.run("online@fast", runner.context("online@fast", micro_tokens=32768))
    return runner


def wins(runner: Runner, policy: str) -> float:
    """The share of held-out games that a policy wins."""
    folder = runner.root / f"artifacts/policies/{policy}/model"
    params = runner.params.rollout
    rows = [
        {**row, "sample_index": index}
        for row in read_parquet(runner.root / "artifacts/data/held_out.parquet", PromptRow)
        for index in range(SAMPLES)
    ]
    seed = runner.params.seed
    requests = [
        Request(row["prompt_ids"], sample_seed(seed, "wins", row["prompt_id"], row["sample_index"]))
        for row in rows
    ]
    generator = TorchGenerator("cpu", Precision.FLOAT32, 256)
    generator.load(folder)
    playing = (params, runner.params.episodes, runner.root / "environments", folder)
    with open_arena(*playing, seed) as arena:
        assert arena is not None
        limits = (params.max_new_tokens, Sampling(params.temperature))
        episodes = play_all(arena, generator, rows, requests, *limits)
    return statistics.fmean(episode.environment_reward or 0.0 for episode in episodes)
