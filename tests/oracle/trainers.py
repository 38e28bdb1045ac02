"""TRL's trainers, made to learn from our rows. Whoever imports this is skipped where TRL is not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.oracle.harness import tokenizer

REASON = "pip install '.[oracle]'"
trl = pytest.importorskip("trl", reason=REASON)
datasets = pytest.importorskip("datasets", reason=REASON)


def settings(folder: Path, rows: int) -> dict[str, Any]:
    """What every TRL configuration needs to work offline, on the CPU, with one batch."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": rows,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": 1,
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def a_trainer(kind: Any, model: nn.Module, args: Any, rows: Sequence[Any], **more: Any) -> Any:
    """One of TRL's, with rows of text to learn from."""
    data = datasets.Dataset.from_list(list(rows))
    words = tokenizer()
    return kind(model=model, args=args, train_dataset=data, processing_class=words, **more)
