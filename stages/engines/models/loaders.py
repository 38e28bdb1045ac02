"""Model loaders: each model loaded anew, or once for the process."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stages.contracts.precision import Precision
from stages.engines.models.classifiers import load_classifier
from stages.engines.models.folders import load_policy, load_scalar_model

Load = Callable[[Path, str, Precision], Any]
"""(folder, device, precision) to a model in evaluation mode."""


@dataclass(frozen=True)
class Loaders:
    policy: Load = load_policy
    scalar: Load = load_scalar_model
    classifier: Load = load_classifier


FRESH = Loaders()
"""Each model is loaded anew, and freed by its caller."""


def resident() -> Loaders:
    """Each model is loaded once, when it is first asked for, and stays."""
    return Loaders(cache(load_policy), cache(load_scalar_model), cache(load_classifier))
