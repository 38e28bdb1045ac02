"""Supervised fine-tuning beside TRL's SFTTrainer."""

from pathlib import Path

import pytest
from torch import Tensor

from stages.algorithms.loss import Counts, Tokens
from stages.algorithms.nll import nll_loss
from tests.oracle.conftest import Record
from tests.oracle.harness import difference, label_logprobs, pairs, policy
from tests.oracle.trainers import a_trainer, settings, trl


@pytest.mark.parametrize(("rows", "setting"), [(4, "one batch"), (2, "two micro-batches")])
def test_the_nll_of_responses(tmp_path: Path, equal: Record, rows: int, setting: str) -> None:
    demonstrations = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs()]
    args = trl.SFTConfig(**settings(tmp_path, rows))
    trainer = a_trainer(trl.SFTTrainer, policy(), args, demonstrations)
    batches = list(trainer.get_train_dataloader())
    num_tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)

    def share(batch: dict[str, Tensor]) -> Tensor:
        logprobs = label_logprobs(trainer.model, batch["input_ids"], batch["attention_mask"])
        tokens = Tokens.padded(batch["labels"][:, 1:] != -100)
        counts = Counts(tokens=num_tokens, sequences=len(pairs()))
        return nll_loss(logprobs, logprobs.detach(), tokens, counts).value

    def trl_share(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = trainer.compute_loss(
            trainer.model, dict(batch), num_items_in_batch=num_tokens
        )
        return loss

    apart = difference(
        trainer.model,
        lambda: sum(map(share, batches)),
        lambda: sum(map(trl_share, batches)),
    )
    equal("SFT", setting, apart)
