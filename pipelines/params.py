"""params.yaml: read strictly, as the model in `stages.contracts.params`."""

from pathlib import Path

from pipelines.strict_yaml import load_model
from stages.contracts.params import Params

PARAMS_FILE = "params.yaml"


def load_params(root: Path) -> Params:
    """The repository's params, or an error that names file, line, key and the nearest known key."""
    return load_model(root / PARAMS_FILE, Params)
