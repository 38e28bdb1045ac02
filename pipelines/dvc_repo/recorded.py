"""What DVC has recorded: every output with its hash, and which of them a command means."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.dvc_repo.graph import address_of
from pipelines.dvc_repo.lock_file import read_stages

_FOLDER = ".dir"


@dataclass(frozen=True)
class Output:
    stage: str
    path: str
    """In the repository."""
    md5: str | None
    """As DVC writes it, with `.dir` behind that of a folder; None where nothing is recorded."""
    in_cache: bool
    """Whether DVC keeps a copy. Summary metrics are in git instead."""
    current: bool
    """Whether dvc.yaml still names it."""

    @property
    def is_folder(self) -> bool:
        return self.md5 is not None and self.md5.endswith(_FOLDER)


@dataclass(frozen=True)
class Choice:
    """An output to look at, or some files of it."""

    output: Output
    within: str
    """The path that was asked for: the output's own, or one inside it."""

    def covers(self, path: str) -> bool:
        return _is_inside(path, self.within)


def read_outputs(root: Path, repo: Any) -> list[Output]:
    """Every output that dvc.yaml or a .dvc file names, and what dvc.lock still has besides."""
    from dvc.exceptions import DvcException
    from dvc.parsing.context import ContextError

    outputs = []
    try:
        for stage in repo.index.stages:
            address = address_of(stage)
            for out in stage.outs:
                path = Path(os.path.relpath(out.fs_path, repo.root_dir)).as_posix()
                md5 = str(out.hash_info.value) if out.hash_info else None
                outputs.append(Output(address, path, md5, out.use_cache, current=True))
    except (DvcException, ContextError) as error:
        raise LockstepError(f"DVC cannot read what is recorded: {error}") from None
    named = {output.path for output in outputs}
    for stage, values in read_stages(root).items():
        for out in values.get("outs", ()):
            if out["path"] not in named:
                md5 = str(out["md5"]) if "md5" in out else None
                outputs.append(Output(stage, out["path"], md5, in_cache=True, current=False))
    return outputs


def choose(root: Path, outputs: list[Output], targets: list[str]) -> list[Choice]:
    """The outputs of the named stages, and those at, below or around the named paths."""
    if not targets:
        return [Choice(output, output.path) for output in outputs]
    chosen: dict[Choice, None] = {}
    for target in targets:
        found = _of_stage(outputs, target) or _at_path(root, outputs, target)
        if not found:
            stages = list(dict.fromkeys(output.stage for output in outputs))
            names = [*stages, *(output.path for output in outputs)]
            near = difflib.get_close_matches(target, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"stages are {', '.join(stages)}"
            raise LockstepError(f"{target!r} is no stage and no path of an output; {hint}")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _of_stage(outputs: list[Output], target: str) -> list[Choice]:
    """Of `rollout@iter_001`, or of `rollout` for all iterations."""
    return [
        Choice(output, output.path)
        for output in outputs
        if target in (output.stage, output.stage.partition("@")[0])
    ]


def _at_path(root: Path, outputs: list[Output], target: str) -> list[Choice]:
    """Of a path seen from the current folder or, as the commands print it, from the root."""
    for start in (Path.cwd(), root):
        # Not resolved: `artifacts` itself may be a link to another disk.
        path = Path(os.path.relpath(start / target, root)).as_posix()
        inside = [
            Choice(output, output.path) for output in outputs if _is_inside(output.path, path)
        ]
        around = [Choice(o, path) for o in outputs if path != o.path and _is_inside(path, o.path)]
        if inside or around:
            return inside + around
    return []


def _is_inside(path: str, folder: str) -> bool:
    return folder == "." or path == folder or path.startswith(f"{folder}/")
