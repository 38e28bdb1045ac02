"""params.yaml: read strictly, as the model in `stages.contracts.params`."""

import os
from operator import attrgetter
from pathlib import Path

from pipelines.base.errors import LockstepError
from pipelines.config.strict_yaml import load_model, place_of
from stages.contracts.params import Params

PARAMS_FILE = "params.yaml"
_OF_PREPARE = ("prepare.folder", "model.folder")
_RECORD = "rollout.tool_record"
_GIVEN = (
    *_OF_PREPARE,
    "reward_model.folder",
    "score.folder",
    "rollout.environments",
    _RECORD,
    "rl.teacher",
)
"""Params that are paths which dvc.yaml depends on."""
_WRITTEN = ("artifacts", "metrics")


def load_params(root: Path, file: Path | None = None) -> Params:
    """The repository's params, or an error that names file, line, key and the nearest known key.

    `file`: another params.yaml for the same repository.
    """
    path = file or root / PARAMS_FILE
    params = load_model(path, Params)
    for key in _GIVEN:
        if wrong := _wrong_path(root.resolve(), key, attrgetter(key)(params)):
            raise LockstepError(f"{place_of(path, key)}: `{key}` {wrong}")
    return params


def refuse_special_files(root: Path, params: Params) -> None:
    """LockstepError where a given folder has, for example, a pipe, which DVC would read forever."""
    for key in _GIVEN:
        for folder, _, names in os.walk(root / attrgetter(key)(params)):
            for path in (Path(folder, name) for name in names):
                if not path.is_file():
                    kind = "a broken link" if path.is_symlink() else "not a regular file"
                    raise LockstepError(f"{path}, in `{key}`, is {kind}: remove it")


def _wrong_path(root: Path, key: str, value: str) -> str | None:
    """Why DVC cannot depend on it: DVC's own error would blame dvc.yaml."""
    if not value.strip():
        return "is empty: name a folder; one that is not read may be an empty folder"
    path = (root / value).resolve()
    for name in _WRITTEN:
        if (root / name).is_relative_to(path):
            return f"is {value!r}, which contains the results in {name}/: use a separate folder"
        if key in _OF_PREPARE and path.is_relative_to(root / name):
            return f"is {value!r}, which is computed after prepare: copy it to a separate folder"
        if key == _RECORD and path.is_relative_to(root / name):
            return f"is {value!r}, which this pipeline computes: copy it to a separate folder"
    return None
