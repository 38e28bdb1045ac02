"""DVC's stage `code`, as the plan foresees it.

It is quick and no job, and every command that runs stages brings it up to date first. So the plan
takes it that its maps are written: a stage is stale when the map of its code would differ, and the
files that differ are named.
"""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from pipelines.base.repository import Repository
from pipelines.identity.code import (
    CODE_COMMAND,
    CODE_STAGE,
    CodeMap,
    changed_files,
    code_maps,
    version_of,
)
from pipelines.identity.map_files import KnownMaps


@dataclass(frozen=True)
class CodeStage:
    """The maps that it would write now, by path; none where a graph has no such stage."""

    root: Path = Path()
    maps: dict[str, CodeMap] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path, command: object, outs: list[str]) -> "CodeStage":
        if command != CODE_COMMAND:
            return cls()
        modules = [f"stages.{PurePosixPath(path).stem}" for path in outs]
        return cls(root, dict(code_maps(root, modules, Repository(root).home)))

    def without(self, upstream: tuple[str, ...]) -> tuple[str, ...]:
        """The stages before another one that it has to wait for."""
        return tuple(it for it in upstream if not (self.maps and it == CODE_STAGE))

    @cached_property
    def versions(self) -> dict[str, str]:
        """The md5 of each."""
        return {path: version_of(code) for path, code in self.maps.items()}

    def reasons(self, path: str, recorded: str | None) -> list[str]:
        """What has changed in a map since the one that dvc.lock names, file by file."""
        if self.versions[path] == recorded:
            return []
        before = self._known.get(recorded)
        if before is None:
            return [f"code {path} modified"]
        changed = changed_files(before, self.maps[path])
        return [f"code {file} {how}" for file, how in changed.items()]

    @cached_property
    def _known(self) -> KnownMaps:
        return KnownMaps(Repository(self.root))
