"""Model loaders: each model loaded anew, or once for the process; whole, or spread over the ranks.

Models are spread where the profile spreads weights and several ranks are joined; all of these then
load a model together. A classifier is taken as somebody else has trained it, for its own tokenizer:
it only answers, and is whole on every rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from stages.context import Context
from stages.contracts.precision import Precision
from stages.engines.models.folders import load_policy, load_scalar_model
from stages.engines.models.lean_transformers import AutoModelForCausalLM
from stages.engines.models.precision import round_weights
from stages.engines.models.scalar_class import AutoScalarModel
from stages.engines.models.weights import check_weights

Load = Callable[[Path, str, Precision], Any]
"""(folder, device, precision) to a model in evaluation mode."""


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


@dataclass(frozen=True)
class Loaders:
    policy: Load = load_policy
    scalar: Load = load_scalar_model
    classifier: Load = load_classifier


FRESH = Loaders()
"""Each model is loaded anew, whole, and freed by its caller."""


def fresh(ctx: Context) -> Loaders:
    """Each model is loaded anew, and freed by its caller."""
    if ctx.ranks is None or not ctx.sharding.spreads_weights:
        return FRESH
    # Imports FSDP, for which a process alone has no use.
    from stages.engines.models.readers import load_spread

    return Loaders(
        partial(load_spread, AutoModelForCausalLM, load_policy, ctx.ranks),
        partial(load_spread, AutoScalarModel, load_scalar_model, ctx.ranks),
    )


def resident(ctx: Context) -> Loaders:
    """Each model is loaded once, when it is first asked for, and stays."""
    load = fresh(ctx)
    return Loaders(cache(load.policy), cache(load.scalar), cache(load.classifier))
