"""KTO and its baseline beside TRL's KTOTrainer."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.algorithms.loss import Counts, Tokens
from stages.algorithms.preference import KtoObjective, kto_baseline, kto_loss
from tests.oracle.conftest import Record
from tests.oracle.harness import Difference, difference, label_logprobs, pairs, policy
from tests.oracle.trainers import a_trainer, settings, trl

WEIGHTS = {"desirable_weight": 1.3, "undesirable_weight": 0.8}


def a_kto_trainer(folder: Path, rows: int, *, noise: float, ref_noise: float) -> Any:
    sides = ["chosen", "rejected", "chosen", "chosen"]
    responses = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row, side in zip(pairs(), sides, strict=True)
    ]
    args = trl.KTOConfig(**settings(folder, rows), beta=0.3, **WEIGHTS)
    models = policy(noise=noise), policy(noise=ref_noise)
    return a_trainer(trl.KTOTrainer, models[0], args, responses, ref_model=models[1])


def of_responses(model: nn.Module, batch: dict[str, Tensor], others: str = "") -> Tensor:
    """[B] log-probs of the responses, or of other prompts' responses: those named KL_."""
    logprobs = label_logprobs(model, batch[f"{others}input_ids"], batch[f"{others}attention_mask"])
    return Tokens.padded(batch[f"{others}completion_mask"][:, 1:]).by_sequence(logprobs)


def beside(trainer: Any) -> tuple[Difference, float]:
    """The difference, and the baseline of our step."""
    model, reference = trainer.model, trainer.ref_model
    batches = list(trainer.get_train_dataloader())
    with torch.no_grad():
        total = sum(
            float((of_responses(model, batch, "KL_") - of_responses(reference, batch, "KL_")).sum())
            for batch in batches
        )
        ref_logprobs = [of_responses(reference, batch) for batch in batches]
    num_sequences = sum(len(batch["label"]) for batch in batches)
    baseline = kto_baseline(total, num_sequences)
    counts = Counts(tokens=1.0, sequences=num_sequences)

    def share(number: int) -> Tensor:
        batch = batches[number]
        return kto_loss(
            of_responses(model, batch),
            ref_logprobs[number],
            batch["label"].bool(),
            batch["completion_mask"].sum(1),
            baseline,
            counts,
            KtoObjective(0.3, **WEIGHTS),
        ).value

    def trl_loss() -> Tensor:
        return sum(trainer.compute_loss(model, dict(batch)) for batch in batches) / len(batches)

    apart = difference(model, lambda: sum(map(share, range(len(batches)))), trl_loss)
    return apart, baseline


def test_kto_above_a_baseline(tmp_path: Path, equal: Record) -> None:
    apart, baseline = beside(a_kto_trainer(tmp_path, 4, noise=0.0, ref_noise=0.1))
    equal("KTO", f"baseline {baseline:.2f}, one batch", apart)
    assert baseline > 0


def test_kto_whose_baseline_is_held_at_zero(tmp_path: Path, equal: Record) -> None:
    apart, baseline = beside(a_kto_trainer(tmp_path, 4, noise=0.1, ref_noise=0.0))
    equal("KTO", "baseline held at 0, one batch", apart)
    assert baseline == 0


def test_trls_baseline_is_that_of_the_micro_batch(tmp_path: Path, record: Record) -> None:
    apart, _ = beside(a_kto_trainer(tmp_path, 2, noise=0.0, ref_noise=0.1))
    record("different", "KTO, two micro-batches", apart)
    assert apart.loss > 1e-3
