"""A policy's folder written anew for others: an adapter merged, weights in another type of number.

python -m stages.engines.models.exported SOURCE TARGET DTYPE
"""

import sys
from pathlib import Path

import torch

from stages.engines.models.folders import load_policy, save_model
from stages.engines.models.precision import is_rounded


def rewrite(source: Path, target: Path, dtype: str) -> None:
    """Each weight is rounded on its own, to the nearest number of the type."""
    model = load_policy(source)
    wanted: torch.dtype = getattr(torch, dtype)
    for name, parameter in model.named_parameters():
        if is_rounded(model, name, parameter):
            parameter.data = parameter.data.to(wanted)
    model.config.dtype = wanted
    save_model(model, target, tokenizer_from=source)


if __name__ == "__main__":
    rewrite(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
