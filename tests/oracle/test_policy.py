"""Policy losses, KL terms and mismatch weights beside TRL's GRPOTrainer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.contracts.objectives import KlEstimator, Mismatch, PolicyObjective
from tests.oracle.conftest import Record
from tests.oracle.grpo import AGGREGATION, PPO, Ours, a_trainer, beside


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo"])
def test_the_clipped_surrogate(
    tmp_path: Path, equal: Record, loss_type: str, kl_coef: float
) -> None:
    trainer = a_trainer(tmp_path, loss_type=loss_type, beta=kl_coef, use_bias_correction_kl=False)
    objective = replace(PPO, aggregation=AGGREGATION[loss_type])
    apart, metric = beside(trainer, Ours(objective, kl_coef))
    equal("GRPO", f"{loss_type}, {f'k3 {kl_coef}' if kl_coef else 'no KL'}", apart)
    assert metric("clip_fraction_low") > 0
    assert metric("clip_fraction_high") > 0


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_a_step_of_two_micro_batches(tmp_path: Path, equal: Record, loss_type: str) -> None:
    trainer = a_trainer(
        tmp_path, micro_batches=2, loss_type=loss_type, beta=0.1, use_bias_correction_kl=False
    )
    objective = replace(PPO, aggregation=AGGREGATION[loss_type])
    apart, _ = beside(trainer, Ours(objective, 0.1))
    equal("GRPO", f"{loss_type}, k3 0.1, two micro-batches", apart)


def test_trls_bnpo_changes_with_the_split_and_ours_does_not(tmp_path: Path, record: Record) -> None:
    trainer = a_trainer(tmp_path, micro_batches=2, loss_type="bnpo")
    apart, _ = beside(trainer, Ours(PPO))
    record("different", "GRPO: bnpo, two micro-batches", apart)
    assert apart.gradient > 0.01


def test_the_dual_clip(tmp_path: Path, equal: Record) -> None:
    trainer = a_trainer(tmp_path, loss_type="dapo", delta=1.5)
    apart, metric = beside(trainer, Ours(replace(PPO, dual_clip=1.5)))
    equal("GRPO", "dapo, dual clip 1.5 (TRL: delta)", apart)
    assert metric("clip_fraction_dual") > 0


def test_the_unbiased_kl(tmp_path: Path, equal: Record) -> None:
    trainer = a_trainer(tmp_path, loss_type="dapo", beta=0.1, use_bias_correction_kl=True)
    apart, _ = beside(trainer, Ours(PPO, 0.1, KlEstimator.K3_UNBIASED))
    equal("GRPO", "dapo, k3_unbiased 0.1 (TRL: use_bias_correction_kl)", apart)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_cispo(tmp_path: Path, equal: Record, kl_coef: float) -> None:
    """TRL's bound is the ratio itself, and from above only."""
    trainer = a_trainer(
        tmp_path, loss_type="cispo", epsilon_high=1.2, beta=kl_coef, use_bias_correction_kl=False
    )
    objective = replace(PPO, kind=PolicyObjective.CISPO, clip_low=1.0, clip_high=0.2)
    apart, metric = beside(trainer, Ours(objective, kl_coef))
    equal("CISPO", f"ratio at most 1.2, {f'k3 {kl_coef}' if kl_coef else 'no KL'}", apart)
    assert metric("clip_fraction_high") > 0


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_gspo(tmp_path: Path, equal: Record, loss_type: str, kl_coef: float) -> None:
    trainer = a_trainer(
        tmp_path,
        loss_type=loss_type,
        importance_sampling_level="sequence",
        epsilon=0.05,
        epsilon_high=0.06,
        beta=kl_coef,
        use_bias_correction_kl=False,
    )
    objective = replace(
        PPO,
        kind=PolicyObjective.GSPO,
        clip_low=0.05,
        clip_high=0.06,
        aggregation=AGGREGATION[loss_type],
    )
    apart, metric = beside(trainer, Ours(objective, kl_coef))
    equal("GSPO", f"{loss_type}, {f'k3 {kl_coef}' if kl_coef else 'no KL'}", apart)
    assert metric("clip_fraction_low") + metric("clip_fraction_high") > 0


def with_a_sampler_of_its_own(trainer: Any) -> Any:
    """As if vLLM had sampled; `rollout_func` stands for it, so that nothing has to be loaded."""
    trainer.use_vllm = True
    trainer._last_loaded_step = trainer.state.global_step
    return trainer


@pytest.mark.parametrize("mode", [mode for mode in Mismatch if mode is not Mismatch.NONE])
def test_weights_against_the_samplers_mismatch(
    tmp_path: Path, equal: Record, mode: Mismatch
) -> None:
    masks = mode in (Mismatch.TOKEN_MASK, Mismatch.SEQUENCE_MASK)
    trainer = a_trainer(
        tmp_path,
        loss_type="dapo",
        beta=0.1,
        use_bias_correction_kl=False,
        vllm_importance_sampling_mode=mode.value,
        vllm_importance_sampling_clip_max=2.0,
        vllm_importance_sampling_clip_min=0.5 if masks else None,
    )
    ours = Ours(PPO, 0.1, mismatch=mode, cap=2.0, floor=0.5)
    apart, _ = beside(with_a_sampler_of_its_own(trainer), ours)
    equal("mismatch", f"{mode}, dapo, k3 0.1", apart)
    weights = trainer._buffered_inputs[0]["importance_sampling_ratio"]
    assert (weights == (0.0 if masks else 2.0)).any()
    assert ((weights > 0.0) & (weights < 2.0)).any()


def test_gspo_with_weights_by_token_is_gspo_token_here(tmp_path: Path, record: Record) -> None:
    trainer = a_trainer(
        tmp_path,
        loss_type="grpo",
        importance_sampling_level="sequence",
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
    )
    objective = replace(PPO, kind=PolicyObjective.GSPO, aggregation=AGGREGATION["grpo"])
    ours = Ours(objective, mismatch=Mismatch.TOKEN_TRUNCATE)
    apart, _ = beside(with_a_sampler_of_its_own(trainer), ours)
    record("different", "GSPO with token_truncate", apart)
    assert apart.gradient > 0.01


def test_gspo_with_an_unbiased_kl_weighs_it_by_token_here(tmp_path: Path, record: Record) -> None:
    trainer = a_trainer(tmp_path, loss_type="dapo", importance_sampling_level="sequence", beta=0.1)
    ours = Ours(replace(PPO, kind=PolicyObjective.GSPO), 0.1, KlEstimator.K3_UNBIASED)
    apart, _ = beside(trainer, ours)
    record("different", "GSPO with k3_unbiased 0.1", apart)
    assert apart.gradient > 0.01
