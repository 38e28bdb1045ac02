"""Bradley–Terry of whole responses beside TRL's RewardTrainer."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stages.algorithms.loss import Counts
from stages.algorithms.reward_loss import bradley_terry_loss
from tests.oracle.conftest import Record
from tests.oracle.harness import difference, pairs, reward_model
from tests.oracle.trainers import a_trainer, settings, trl

MARGINS = [0.0, 0.4, 1.0, 0.2]


@pytest.mark.parametrize(
    ("centre", "margins"), [(0.0, False), (0.1, False), (0.0, True), (0.1, True)]
)
def test_bradley_terry(tmp_path: Path, equal: Record, centre: float, margins: bool) -> None:
    rows = [
        {"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]}
        | ({"margin": margin} if margins else {})
        for row, margin in zip(pairs(), MARGINS, strict=True)
    ]
    args = trl.RewardConfig(**settings(tmp_path, 4), center_rewards_coefficient=centre or None)
    trainer = a_trainer(trl.RewardTrainer, reward_model(), args, rows)
    (batch,) = trainer.get_train_dataloader()

    def our_loss() -> Tensor:
        hidden = trainer.model.model(batch["input_ids"], batch["attention_mask"], use_cache=False)
        last = batch["attention_mask"].sum(1) - 1
        scores = trainer.model.score(hidden.last_hidden_state).squeeze(-1)
        chosen, rejected = scores.gather(1, last[:, None]).chunk(2)
        return bradley_terry_loss(
            chosen,
            rejected,
            torch.ones_like(chosen),
            Counts(tokens=len(chosen), sequences=len(chosen)),
            centre=centre,
            margins=batch.get("margin"),
        ).value

    apart = difference(
        trainer.model, our_loss, lambda: trainer.compute_loss(trainer.model, dict(batch))
    )
    equal("reward model", f"centre {centre}, {'margins' if margins else 'no margins'}", apart)
