"""Whole updates on random batches beside TRL's trainers, in float64: the weights at the end."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages.algorithms.preference import PreferenceObjective
from stages.contracts.objectives import PreferenceLoss
from stages.contracts.optimizer import OptimizerParams
from stages.contracts.params import Params
from stages.contracts.policy_update import PolicyUpdateConfig
from stages.contracts.precision import Precision
from stages.contracts.reward_model import Compared, RewardModelParams, RewardObjective
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.processes.ranks import ALONE
from stages.engines.training.loop import Work, fresh_learner, train
from stages.engines.training.resume import Metrics
from stages.engines.training.rl_state import RlState
from stages.learning.experience import Experience
from stages.learning.imitation import imitation
from stages.learning.pairs import paired_batch, preference
from stages.learning.policy_gradient import ascend, response_batch
from stages.learning.update import Update, continued_learner
from stages.reward_model import _WORK
from tests.oracle.conftest import Record
from tests.oracle.harness import Difference, policy, reward_model
from tests.oracle.trainers import a_trainer, trl
from tests.oracle.updates import (
    MOST_APART,
    Batch,
    Drawn,
    Given,
    a_context,
    apart,
    compute_in_float64,
    token_ids,
    trl_update,
)

BIASED = {"attention_bias": True, "mlp_bias": True}
"""So that weight decay has biases to spare, beside norms."""
SEEDS = range(3)
Models = tuple[nn.Module, nn.Module, nn.Module]
"""As both began, ours and TRL's."""


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_float64(monkeypatch)


def real_rows(batch: Batch) -> list[tuple[int, ...]]:
    """The tokens of each row, without padding."""
    pairs = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    return [tuple(ids[kept].tolist()) for ids, kept in pairs]


def our_update(folder: Path, drawn: Drawn, model: nn.Module, work: Work) -> list[Metrics]:
    ctx = a_context(folder)
    params = OptimizerParams(epochs=1, batch_size=1, **drawn.params())
    learner = fresh_learner(ctx, ALONE, model, params, Precision.FLOAT32)
    plan = Given.of(drawn, drawn.steps)
    return train(ctx, {"model": learner}, plan, work, shown=["loss"])


def compare(models: Models) -> Difference:
    """The norms of what became of the weights stand for losses."""
    start, ours, theirs = models
    return Difference(norm(ours), norm(theirs), apart(start, ours, theirs), None)


def norm(model: nn.Module) -> float:
    with torch.no_grad():
        return float(torch.cat([weight.flatten() for weight in model.parameters()]).norm())


def judge(
    record: Record, setting: str, drawn: Drawn, models: Models, history: Sequence[Metrics]
) -> None:
    """Our weights must be TRL's, and steps clipped or not as the draw says."""
    found = compare(models)
    record("whole updates", setting, found)
    assert found.loss is not None
    assert found.loss <= MOST_APART
    is_clipped = {step["grad_norm"] > drawn.max_grad_norm for step in history}
    assert is_clipped == {drawn.max_grad_norm < 1}


@pytest.mark.parametrize("seed", SEEDS)
def test_sft(tmp_path: Path, record: Record, seed: int) -> None:
    drawn = Drawn.by(seed)
    rows = [(drawn.words(1, 6), f" {drawn.words(1, 9)} </s>") for _ in range(drawn.num_rows)]
    start = policy(seed, **BIASED).double()
    shown = [{"prompt": prompt, "completion": completion} for prompt, completion in rows]
    args = trl.SFTConfig(**drawn.trl(tmp_path))
    trainer = a_trainer(trl.SFTTrainer, copy.deepcopy(start), args, shown)
    batches = trl_update(trainer)
    known = {
        (*token_ids(prompt), *token_ids(completion)): (token_ids(prompt), token_ids(completion))
        for prompt, completion in rows
    }
    taken = [known[row] for batch in batches for row in real_rows(batch)]
    ours = copy.deepcopy(start)
    prompts, completions = zip(*taken, strict=True)
    work = imitation(ours, prompts, completions, "cpu", str)
    history = our_update(tmp_path / "ours", drawn, ours, work)
    judge(record, f"SFT, draw {seed}", drawn, (start, ours, trainer.model), history)


def drawn_pairs(drawn: Drawn) -> list[dict[str, Any]]:
    """Texts, and under the names that our stages have, their tokens."""
    pairs = []
    for _ in range(drawn.num_rows):
        prompt = drawn.words(1, 6)
        sides = {side: f" {drawn.words(1, 9)} </s>" for side in ("chosen", "rejected")}
        pairs.append(
            {
                "text": {"prompt": prompt, **sides},
                "prompt_ids": token_ids(prompt),
                **{f"{side}_ids": token_ids(words) for side, words in sides.items()},
                "margin": drawn.dice.choice([0.0, 0.25, 0.5, 1.5]),
            }
        )
    return pairs


def taken_pairs(pairs: Sequence[dict[str, Any]], batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """As TRL took them: the chosen responses of a batch, then the rejected ones."""
    known = {
        tuple((*pair["prompt_ids"], *pair[f"{side}_ids"]) for side in ("chosen", "rejected")): pair
        for pair in pairs
    }
    taken = []
    for batch in batches:
        rows = real_rows(batch)
        half = len(rows) // 2
        taken += [known[both] for both in zip(rows[:half], rows[half:], strict=True)]
    return taken


def with_reference(model: nn.Module, pair: dict[str, Any]) -> dict[str, Any]:
    batch = paired_batch(model, [pair], "cpu")
    with torch.no_grad():
        said = response_logprobs(model, batch, 1.0).logprobs * batch.loss_mask
    chosen, rejected = said.sum(1).tolist()
    return {**pair, "chosen_ref": chosen, "rejected_ref": rejected}


@pytest.mark.parametrize(
    ("seed", "kind"),
    [(0, "sigmoid"), (1, "ipo"), (2, "hinge"), (3, "sigmoid")],
)
def test_dpo(tmp_path: Path, record: Record, seed: int, kind: str) -> None:
    drawn = Drawn.by(seed)
    pairs, beta = drawn_pairs(drawn), drawn.dice.uniform(0.1, 0.5)
    reference = policy(seed, **BIASED).double()
    start = policy(seed, noise=0.1, **BIASED).double()
    trainer = a_trainer(
        trl.DPOTrainer,
        copy.deepcopy(start),
        trl.DPOConfig(**drawn.trl(tmp_path), loss_type=[kind], beta=beta),
        [pair["text"] for pair in pairs],
        ref_model=copy.deepcopy(reference),
    )
    taken = taken_pairs(pairs, trl_update(trainer))
    ours = copy.deepcopy(start)
    rows = [with_reference(reference, pair) for pair in taken]
    work = preference(ours, rows, "cpu", PreferenceObjective(PreferenceLoss(kind), beta))
    history = our_update(tmp_path / "ours", drawn, ours, work)
    judge(record, f"DPO ({kind}), draw {seed}", drawn, (start, ours, trainer.model), history)


@pytest.mark.parametrize("seed", SEEDS)
def test_reward_model(tmp_path: Path, record: Record, seed: int) -> None:
    drawn = Drawn.by(seed)
    pairs, centre = drawn_pairs(drawn), drawn.dice.choice([0.0, 0.1])
    start = reward_model(seed, **BIASED).double()
    rows = [
        {
            **{
                side: pair["text"]["prompt"] + pair["text"][side] for side in ("chosen", "rejected")
            },
            "margin": pair["margin"],
        }
        for pair in pairs
    ]
    args = trl.RewardConfig(**drawn.trl(tmp_path), center_rewards_coefficient=centre or None)
    trainer = a_trainer(trl.RewardTrainer, copy.deepcopy(start), args, rows)
    taken = taken_pairs(pairs, trl_update(trainer))
    ours = copy.deepcopy(start)
    params = RewardModelParams(compared=Compared.LAST_TOKEN, centre=centre)
    work = _WORK[RewardObjective.BRADLEY_TERRY](ours, taken, params, "cpu")
    history = our_update(tmp_path / "ours", drawn, ours, work)
    judge(record, f"reward model, draw {seed}", drawn, (start, ours, trainer.model), history)


def a_config(drawn: Drawn, temperature: float, **update: Any) -> PolicyUpdateConfig:
    params = Params.model_validate(
        {
            "rl": {"algorithm": "grpo"},
            "rollout": {"temperature": temperature},
            "policy_update": {
                **drawn.params(),
                "kl_in": "loss",
                "kl_estimator": "k3",
                "max_kl": 1e6,
                **update,
            },
        }
    )
    config = PolicyUpdateConfig.from_params(params, "iter_001")
    assert isinstance(config, PolicyUpdateConfig)
    return config


def cut(tensor: Tensor, mask: Tensor) -> list[Any]:
    """What of a padded row is real."""
    values: list[Any] = tensor[mask.bool()].tolist()
    return values


def taken_responses(batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """The rows of TRL's batches as rollouts, each with its advantage."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
    rows = []
    for batch in batches:
        columns = [batch[name] for name in (*names, "advantages")]
        for prompt, prompt_mask, completion, mask, own, advantage in zip(*columns, strict=True):
            rows.append(
                {
                    "prompt_id": "p",
                    "sample_index": len(rows),
                    "prompt_ids": cut(prompt, prompt_mask),
                    "response_ids": cut(completion, mask),
                    "loss_mask": cut(own, mask),
                    "support": None,
                    "ref_logprobs": [],
                    "advantage": float(advantage),
                }
            )
    return rows


def experience(
    model: nn.Module, reference: nn.Module, rows: Sequence[dict[str, Any]], temperature: float
) -> Experience:
    """Both models' log-probs before the update, with the advantages that TRL computed."""
    batch = response_batch(model, rows, "cpu")
    with torch.no_grad():
        old, ref = (response_logprobs(m, batch, temperature).logprobs for m in (model, reference))
    advantages = torch.tensor([row["advantage"] for row in rows], dtype=torch.float64)
    mask = batch.loss_mask
    return Experience(
        mask=mask,
        logprobs=old,
        ref_logprobs=ref,
        weights=torch.ones_like(mask),
        advantages=advantages[:, None] * mask,
        values=torch.zeros_like(mask),
        returns=torch.zeros_like(mask),
    )


@dataclass(frozen=True)
class Grpo:
    """A setting of TRL's, and ours that is the same."""

    loss_type: str
    aggregation: str
    level: str = "token"
    steps: int = 2
    """Optimizer steps over the responses of one generation, each of which is gone over twice."""

    @property
    def objective(self) -> str:
        return "gspo" if self.level == "sequence" else "clip"

    def __str__(self) -> str:
        return f"{self.loss_type}, ratio by {self.level}, {self.steps} x 2 steps"


PASSES = 2
LONGEST = 9


def grpo_update(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, setting: Grpo
) -> tuple[Drawn, Models, list[Metrics]]:
    """Both sides learn from the same responses, so often that ratios are clipped."""
    drawn = replace(Drawn.by(seed), steps=setting.steps)
    num_steps, dice = PASSES * drawn.steps, drawn.dice
    size = dice.choice([n for n in (2, 3, 4, 6) if drawn.num_rows % n == 0])
    temperature, kl_coef = dice.uniform(0.7, 1.3), dice.choice([0.05, 0.2])
    prompts = [drawn.words(1, 6) for _ in range(drawn.num_rows // size)]
    said = [token_ids(drawn.words(1, LONGEST)) for _ in range(drawn.num_rows)]
    own = [[int(n == 0 or dice.random() < 0.8) for n in range(len(ids))] for ids in said]
    rewards = [dice.gauss(0, 1) for _ in said]
    reference, start = policy(seed, **BIASED).double(), policy(seed, noise=0.1, **BIASED).double()
    reference.save_pretrained(folder / "reference")
    theirs = copy.deepcopy(start)
    theirs.config._name_or_path = str(folder / "reference")

    def rollout(asked: list[str], _: Any) -> dict[str, Any]:
        return {
            "prompt_ids": [token_ids(prompt) for prompt in asked],
            "completion_ids": said,
            "logprobs": [[0.0] * len(ids) for ids in said],
            "env_mask": own,
        }

    trainer = a_trainer(
        trl.GRPOTrainer,
        theirs,
        trl.GRPOConfig(
            **{**drawn.trl(folder), "max_steps": num_steps},
            num_generations=size,
            steps_per_generation=drawn.accumulated * drawn.steps,
            num_iterations=PASSES,
            max_completion_length=LONGEST,
            temperature=temperature,
            epsilon=0.1,
            epsilon_high=0.2,
            beta=kl_coef,
            use_bias_correction_kl=False,
            loss_type=setting.loss_type,
            importance_sampling_level=setting.level,
        ),
        [{"prompt": prompt} for prompt in prompts],
        reward_funcs=lambda **_: rewards,
        rollout_func=rollout,
    )
    rows = taken_responses(trl_update(trainer))
    config = a_config(
        drawn,
        temperature,
        aggregation=setting.aggregation,
        objective=setting.objective,
        length_scale=float(LONGEST),
        clip_low=0.1,
        clip_high=0.2,
        kl_coef=kl_coef,
        schedule="linear",
        warmup_steps=0,
        decay_steps=num_steps,
    )
    ctx, ours, state = a_context(folder / "ours"), copy.deepcopy(start), RlState(0, None, {})
    learner = continued_learner(ctx, ALONE, ours, "policy", drawn.learning_rate, config, state)
    monkeypatch.setattr(Update, "plan", lambda *_: Given.of(drawn, num_steps))
    update = Update(config, {}, ctx, ALONE, state, {"policy": learner}, rows, {})
    before = experience(ours, reference, rows, temperature)
    history = ascend(update, range(len(rows)), before, kl_coef)
    return drawn, (start, ours, trainer.model), history


@pytest.mark.parametrize(
    ("seed", "setting"),
    [
        (0, Grpo("dapo", "token_mean", steps=1)),
        (1, Grpo("grpo", "sequence_mean_token_mean")),
        (2, Grpo("dr_grpo", "sequence_mean_token_sum")),
        (4, Grpo("grpo", "sequence_mean_token_mean", "sequence")),
    ],
    ids=str,
)
def test_grpo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Record, seed: int, setting: Grpo
) -> None:
    drawn, models, history = grpo_update(tmp_path, monkeypatch, seed, setting)
    assert max(step["clip_fraction_low"] + step["clip_fraction_high"] for step in history) > 0
    judge(record, f"GRPO: {setting}, draw {seed}", drawn, models, history)


def test_trls_dapo_divides_by_the_mean_of_a_generations_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Record
) -> None:
    setting = Grpo("dapo", "token_mean")
    _, models, _ = grpo_update(tmp_path, monkeypatch, 0, setting)
    found = compare(models)
    record("different", f"update by GRPO: {setting}", found)
    assert found.loss is not None
    assert found.loss > 0.01
