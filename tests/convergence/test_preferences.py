"""Preferences for one of two styles are learnt, and the other way round when they are swapped.

The policy starts with a word that ends in ! or in a full stop, either as often. After it has learnt
from pairs, or from single responses with a rating, it ends words to prompts it has not seen with !,
and its log-ratio to the start ranks held-out pairs.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stages.data.tokenizer import Decoder
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.padded import generate
from stages.engines.models.folders import load_policy
from tests.convergence.runs import START, collate_one_off, continued, logprobs_by
from tests.stages.conftest import Runner

LEARNT = "artifacts/policies/liked/model"
NUM_SAMPLES = 64
NO_STYLE, STYLE, RANKED = 0.6, 0.8, 0.9
"""Over two seeds and all losses, what is learnt came to 0.95 and more, the other style to 0.03 and
less, log-probs one position off to 0.33 and less, and every pair was ranked: one seed is enough."""


@dataclass(frozen=True)
class Case:
    """A loss, and the module that puts its responses together."""

    loss: str
    beta: float
    batch_size: int
    collates: str = "data.segments"
    label_smoothing: float = 0.0


CASES = [
    Case("sigmoid", beta=0.1, batch_size=16),
    Case("hinge", beta=0.1, batch_size=16),
    Case("ipo", beta=0.1, batch_size=16),
    Case("robust", beta=0.1, batch_size=16, label_smoothing=0.1),
    Case("apo_zero", beta=0.1, batch_size=16),
    Case("simpo", beta=0.1, batch_size=16),
    Case("orpo", beta=1.0, batch_size=16),
    Case("kto", beta=1.0, batch_size=32, collates="learning.unpaired"),
]
BY_LOSS = pytest.mark.parametrize("case", CASES, ids=[case.loss for case in CASES])


def run_of(case: Case, start: Runner, root: Path) -> Runner:
    return continued(
        start,
        root,
        rl={"preferences": {"liked": {"policy": "sft"}}},
        preference={
            "loss": case.loss,
            "beta": case.beta,
            "label_smoothing": case.label_smoothing,
            "batch_size": case.batch_size,
            "learning_rate": 3e-3,
            "epochs": 4,
        },
    )


def learn(runner: Runner) -> int:
    runner.run("reference_logprobs@liked")
    return runner.run("preference@liked")["num_steps"]


def share_of_style(runner: Runner, policy: str) -> float:
    """How many of a policy's responses to held-out prompts end with the preferred mark."""
    folder = runner.root / policy
    seeds = random.Random(0)
    requests = [
        Request(row["prompt_ids"], seeds.getrandbits(62))
        for row in runner.rows("data/held_out")
        for _ in range(NUM_SAMPLES)
    ]
    sampled = generate(load_policy(folder), requests, max_new_tokens=6, sampling=Sampling())
    decoder = Decoder(folder)
    return sum(decoder.text(one.ids).endswith("!") for one in sampled) / len(sampled)


def share_ranked_right(runner: Runner) -> float:
    """How many held-out pairs the learnt policy's log-ratios to the start rank as they should."""
    pairs = runner.rows("data/held_out_preferences")
    chosen, rejected = (_log_ratios(runner, pairs, side) for side in ("chosen", "rejected"))
    return sum(c > r for c, r in zip(chosen, rejected, strict=True)) / len(pairs)


def _log_ratios(runner: Runner, pairs: Sequence[Any], side: str) -> list[float]:
    whole = {"support": None, "loss_mask": None}
    rows = [{**pair, "response_ids": pair[f"{side}_ids"], **whole} for pair in pairs]
    learnt, start = (logprobs_by(runner, runner.root / name, rows) for name in (LEARNT, START))
    return [sum(now) - sum(before) for now, before in zip(learnt, start, strict=True)]


def swap_preferences(runner: Runner) -> None:
    """Make the data say the opposite, after they were prepared."""
    runner.rewrite(
        "data/preferences",
        lambda pair: {"chosen_ids": pair["rejected_ids"], "rejected_ids": pair["chosen_ids"]},
    )
    runner.rewrite("data/feedback", lambda row: {"rating": 1.0 - row["rating"]})


@BY_LOSS
def test_the_preferred_style_is_learnt(case: Case, either_style: Runner, tmp_path: Path) -> None:
    runner = run_of(case, either_style, tmp_path)
    assert learn(runner) <= 50
    assert share_of_style(runner, START) < NO_STYLE
    assert share_of_style(runner, LEARNT) > STYLE
    assert share_ranked_right(runner) > RANKED


@BY_LOSS
def test_swapped_preferences_teach_the_other_style(
    case: Case, either_style: Runner, tmp_path: Path
) -> None:
    runner = run_of(case, either_style, tmp_path)
    swap_preferences(runner)
    learn(runner)
    assert share_of_style(runner, LEARNT) < 1 - STYLE
    assert share_ranked_right(runner) < 1 - RANKED


@BY_LOSS
def test_log_probs_read_one_position_off_teach_no_style(
    case: Case, either_style: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = run_of(case, either_style, tmp_path)
    with monkeypatch.context() as patched:
        for module in {f"stages.{case.collates}", "stages.data.segments"}:
            patched.setattr(f"{module}.collate", collate_one_off)
        learn(runner)
    assert share_of_style(runner, LEARNT) < NO_STYLE
