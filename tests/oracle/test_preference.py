"""Losses of preference pairs beside TRL's DPOTrainer, CPOTrainer (SimPO) and ORPOTrainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages.algorithms.loss import Counts, Tokens
from stages.algorithms.preference import PairLogprobs, PreferenceObjective, preference_loss
from stages.contracts.objectives import PreferenceLoss
from tests.oracle.conftest import Record
from tests.oracle.harness import Difference, difference, label_logprobs, pairs, policy
from tests.oracle.trainers import REASON, a_trainer, settings, trl

cpo = pytest.importorskip("trl.experimental.cpo", reason=REASON)
orpo = pytest.importorskip("trl.experimental.orpo", reason=REASON)

Batch = dict[str, Tensor]


def a_dpo_trainer(folder: Path, rows: int, **config: Any) -> Any:
    args = trl.DPOConfig(**settings(folder, rows), **config)
    return a_trainer(trl.DPOTrainer, policy(noise=0.1), args, pairs(), ref_model=policy())


def of_responses(model: nn.Module, batch: Batch) -> PairLogprobs:
    """From a batch of the chosen, then the rejected, with a mask over their tokens."""
    logprobs = label_logprobs(model, batch["input_ids"], batch["attention_mask"])
    return PairLogprobs.from_tokens(logprobs, Tokens.padded(batch["completion_mask"][:, 1:]))


def beside_dpo(trainer: Any, ours: PreferenceObjective) -> Difference:
    """Our shares of the step beside TRL's mean over its micro-batches."""
    batches = list(trainer.get_train_dataloader())
    with torch.no_grad():
        references = [of_responses(trainer.ref_model, batch) for batch in batches]
    parts = [reference.counts() for reference in references]
    counts = Counts(sum(part.tokens for part in parts), sum(part.sequences for part in parts))

    def our_loss() -> Tensor:
        return sum(
            preference_loss(of_responses(trainer.model, batch), reference, counts, ours).value
            for batch, reference in zip(batches, references, strict=True)
        )

    def trl_loss() -> Tensor:
        return sum(trainer.compute_loss(trainer.model, dict(batch)) for batch in batches) / len(
            batches
        )

    return difference(trainer.model, our_loss, trl_loss)


@pytest.mark.parametrize(
    ("kind", "label_smoothing"),
    [
        (PreferenceLoss.SIGMOID, 0.0),
        (PreferenceLoss.HINGE, 0.0),
        (PreferenceLoss.IPO, 0.0),
        (PreferenceLoss.ROBUST, 0.2),
        (PreferenceLoss.APO_ZERO, 0.0),
        (PreferenceLoss.APO_DOWN, 0.0),
    ],
)
@pytest.mark.parametrize("rows", [4, 2])
def test_losses_against_a_reference(
    tmp_path: Path, equal: Record, kind: PreferenceLoss, label_smoothing: float, rows: int
) -> None:
    trainer = a_dpo_trainer(
        tmp_path, rows, loss_type=[kind.value], beta=0.3, label_smoothing=label_smoothing
    )
    apart = beside_dpo(trainer, PreferenceObjective(kind, 0.3, label_smoothing))
    equal("DPO", f"{kind}, {'one batch' if rows == 4 else 'two micro-batches'}", apart)


def test_smoothed_labels_are_trls_aot_of_single_pairs(tmp_path: Path, equal: Record) -> None:
    """TRL has no cDPO by name; what `aot` adds to it, sorting, does nothing to one pair."""
    trainer = a_dpo_trainer(tmp_path, 1, loss_type=["aot"], beta=0.3, label_smoothing=0.2)
    apart = beside_dpo(trainer, PreferenceObjective(PreferenceLoss.SIGMOID, 0.3, 0.2))
    equal("DPO", "sigmoid, label_smoothing 0.2 (TRL: aot, one pair a micro-batch)", apart)


def test_the_nll_of_chosen_responses_beside_dpo(tmp_path: Path, equal: Record) -> None:
    trainer = a_dpo_trainer(
        tmp_path, 4, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5], beta=0.3
    )
    apart = beside_dpo(trainer, PreferenceObjective(PreferenceLoss.SIGMOID, 0.3, nll_coef=0.5))
    equal("DPO", "sigmoid with nll_coef 0.5, one batch", apart)


def test_trls_nll_is_a_mean_over_the_micro_batch(tmp_path: Path, record: Record) -> None:
    trainer = a_dpo_trainer(
        tmp_path, 1, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5], beta=0.3
    )
    apart = beside_dpo(trainer, PreferenceObjective(PreferenceLoss.SIGMOID, 0.3, nll_coef=0.5))
    record("different", "DPO: sigmoid with nll_coef 0.5, one pair a micro-batch", apart)
    assert apart.gradient > 0.01


def without_a_reference(model: nn.Module, batch: Batch) -> PairLogprobs:
    """From the batch of CPOTrainer and ORPOTrainer: two sides, with labels."""
    sums, lengths = [], []
    for side in ("chosen", "rejected"):
        tokens = Tokens.padded(batch[f"{side}_labels"][:, 1:] != -100)
        logprobs = label_logprobs(
            model, batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"]
        )
        sums.append(tokens.by_sequence(logprobs))
        lengths.append(tokens.lengths)
    return PairLogprobs(*sums, *lengths)


def beside_reference_free(trainer: Any, ours: PreferenceObjective) -> Difference:
    (batch,) = trainer.get_train_dataloader()

    def our_loss() -> Tensor:
        logprobs = without_a_reference(trainer.model, batch)
        return preference_loss(logprobs, None, logprobs.counts(), ours).value

    return difference(trainer.model, our_loss, lambda: trainer.compute_loss(trainer.model, batch))


@pytest.mark.parametrize(("margin", "nll_coef"), [(0.0, 0.0), (0.5, 0.0), (0.5, 0.3)])
def test_simpo(tmp_path: Path, equal: Record, margin: float, nll_coef: float) -> None:
    config = cpo.CPOConfig(
        **settings(tmp_path, 4),
        loss_type="simpo",
        beta=2.0,
        simpo_gamma=margin,
        cpo_alpha=nll_coef,
        max_length=64,
    )
    trainer = a_trainer(cpo.CPOTrainer, policy(noise=0.1), config, pairs())
    objective = PreferenceObjective(
        PreferenceLoss.SIMPO, beta=2.0, margin=margin, nll_coef=nll_coef
    )
    apart = beside_reference_free(trainer, objective)
    equal("SimPO", f"margin {margin}, nll_coef {nll_coef}", apart)


def an_orpo_trainer(folder: Path, rows: list[dict[str, str]]) -> Any:
    args = orpo.ORPOConfig(**settings(folder, 4), beta=0.3, max_length=64)
    return a_trainer(orpo.ORPOTrainer, policy(noise=0.1), args, rows)


def test_orpo_of_bare_responses(tmp_path: Path, equal: Record) -> None:
    """With no prompt, TRL's negative log-likelihood too is of the response alone."""
    trainer = an_orpo_trainer(tmp_path, [{**row, "prompt": ""} for row in pairs()])
    apart = beside_reference_free(trainer, PreferenceObjective(PreferenceLoss.ORPO, 0.3))
    equal("ORPO", "empty prompts", apart)


def test_the_nll_of_orpo_is_of_responses_here(tmp_path: Path, record: Record) -> None:
    trainer = an_orpo_trainer(tmp_path, pairs())
    apart = beside_reference_free(trainer, PreferenceObjective(PreferenceLoss.ORPO, 0.3))
    record("different", "ORPO with prompts", apart)
    assert apart.gradient > 0.01
