"""Precision: the type that a model computes in.

Files hold float32 weights. A model that computes in another type has them rounded, each weight on
its own and always in the same way, so whoever loads a folder computes with the same bits. Buffers
that are no weights, such as the frequencies of rotary embeddings, are never rounded.
"""

from typing import Any

import torch
from torch import Tensor

from stages.contracts.precision import Precision

DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}


def round_weights(model: Any, precision: Precision) -> None:
    """Round a model's float32 weights to what it is to compute in, in place."""
    if precision is Precision.FLOAT32:
        return
    for name, parameter in model.named_parameters():
        if is_rounded(model, name, parameter):
            parameter.data = rounded(parameter.data, precision)


def rounded(tensor: Tensor, precision: Precision) -> Tensor:
    if precision is Precision.FLOAT32 or not tensor.is_floating_point():
        return tensor
    return tensor.to(DTYPES[precision])


def is_rounded(model: Any, name: str, tensor: Tensor) -> bool:
    """Whether a weight is; some models compute with a few that have to stay as they are."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return tensor.is_floating_point() and not any(part in name.split(".") for part in kept)
