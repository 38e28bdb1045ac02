"""Params as `dvc exp run -S key=value` would set them, while params.yaml stays as it is.

DVC's own reader of overrides is used, on a copy in the system's temporary folder. So a name, a
type and a list mean here what they mean there, and whatever kills the process, the workspace has
not been written to.
"""

import difflib
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.config.params import PARAMS_FILE, load_params
from pipelines.config.strict_yaml import load_yaml
from stages.contracts.params import Params

_OTHER_FILE = re.compile(r"(?P<file>[^=:\[{'\"]+\.\w+):(?=[+~]*[\w@.-]+(=|$))")


@dataclass(frozen=True)
class Overridden:
    """params.yaml with some values replaced."""

    params: Params
    values: dict[str, Any]
    """As DVC reads them."""


def override(root: Path, settings: Sequence[str]) -> Overridden:
    """The params with these settings; LockstepError says which of them is wrong, and how."""
    settings = [_of_params(setting) for setting in settings]
    with tempfile.TemporaryDirectory(prefix="lockstep-plan-") as folder:
        path = Path(folder) / PARAMS_FILE
        shutil.copyfile(root / PARAMS_FILE, path)
        _apply(path, settings)
        try:
            return Overridden(load_params(root, path), load_yaml(path))
        except LockstepError as error:
            what = f"{PARAMS_FILE} with -S {' -S '.join(settings)}"
            raise LockstepError(
                re.sub(rf"{re.escape(str(path))}(:\d+)?", what, str(error))
            ) from None


def _of_params(setting: str) -> str:
    """Without the name of the file, which may stand before a setting, as in DVC's commands."""
    named = _OTHER_FILE.match(setting)
    if named and named["file"] != PARAMS_FILE:
        raise LockstepError(f"-S {setting}: stages read {PARAMS_FILE} alone, not {named['file']}")
    return setting[named.end() :] if named else setting


def _apply(path: Path, settings: Sequence[str]) -> None:
    from dvc.exceptions import InvalidArgumentError
    from dvc.utils.hydra import apply_overrides, to_hydra_overrides
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    known = list(_keys(load_yaml(path)))
    for setting in settings:
        try:
            [parsed] = to_hydra_overrides([setting])
            if parsed.is_sweep_override():
                raise LockstepError(f"-S {setting}: several values; plan one at a time")
            apply_overrides(path, [setting])
        except (InvalidArgumentError, HydraException, OmegaConfBaseException) as error:
            reason = str(error.__cause__ or error).split("\n")[0]
            raise LockstepError(f"-S {setting}: {_explain(setting, known) or reason}") from None


def _explain(setting: str, known: Sequence[str]) -> str | None:
    """Where a setting names no param, what may have been meant."""
    key, equals, _ = setting.partition("=")
    bare = key.lstrip("+~")
    if not equals and not key.startswith("~"):
        return "write it as key=value"
    if bare in known:
        return None
    if bare in _keys(Params().model_dump(mode="json")):
        return f"{PARAMS_FILE} does not name {bare}, which has its default: write -S +{setting}"
    near = difflib.get_close_matches(bare, [*known, *_keys(Params().model_dump())], n=1, cutoff=0)
    return f"there is no param {bare}" + (f"; did you mean {near[0]}?" if near else "")


def _keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key of a mapping, those of its sections as dotted names."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
