"""Supervised fine-tuning beside TRL's SFTTrainer."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from stages.algorithms.loss import Counts, Tokens
from stages.algorithms.nll import nll_loss
from tests.oracle.conftest import Record
from tests.oracle.harness import (
    REASON,
    difference,
    label_logprobs,
    pairs,
    policy,
    settings,
    tokenizer,
)

trl = pytest.importorskip("trl", reason=REASON)
datasets = pytest.importorskip("datasets", reason=REASON)
pytestmark = pytest.mark.oracle


def a_trainer(folder: Path, rows: int) -> Any:
    demonstrations = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs()]
    return trl.SFTTrainer(
        model=policy(),
        args=trl.SFTConfig(**settings(folder, rows)),
        train_dataset=datasets.Dataset.from_list(demonstrations),
        processing_class=tokenizer(),
    )


@pytest.mark.parametrize(("rows", "setting"), [(4, "one batch"), (2, "two micro-batches")])
def test_the_nll_of_responses(tmp_path: Path, record: Record, rows: int, setting: str) -> None:
    trainer = a_trainer(tmp_path, rows)
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
    record("SFT", setting, apart)
    apart.check()
