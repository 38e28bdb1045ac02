"""A classifier as somebody else has trained it, for its own tokenizer: it only answers."""

from pathlib import Path
from typing import Any

import torch

from stages.contracts.precision import Precision
from stages.engines.models.precision import round_weights
from stages.engines.models.scalar_class import AutoScalarModel
from stages.engines.models.weights import check_weights


def load_classifier(folder: Path, device: str, precision: Precision) -> Any:
    model = AutoScalarModel.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    round_weights(model, precision)
    model = model.to(device).eval()
    check_weights(model, folder)
    if model.config.pad_token_id is None:
        # Its texts are never padded: no token is to be taken for padding.
        model.config.pad_token_id = -1
    return model
