"""The code maps on disk: `code/*.json` in the workspace, and those that were there before.

A map in the workspace was written by DVC's stage `code` in this clone, which keeps a copy under
`.lockstep`, or came with a commit. So a map that dvc.lock, or a job, names by its md5 is found as
long as one of the two is there.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.base.git import blob_contents, git
from pipelines.base.repository import Repository
from pipelines.identity.code import (
    CODE_STAGE,
    CodeMap,
    changed_files,
    code_maps,
    map_path,
    map_text,
    version_of,
)

_MOST_NAMED = 3


def write_maps(repository: Repository, modules: Iterable[str]) -> None:
    """Write the map of each module, and keep a copy."""
    for path, code in code_maps(repository.root, modules, repository.home).items():
        atomic.write_text(repository.root / path, map_text(code))
        kept = _kept(repository, version_of(code))
        if not kept.exists():
            atomic.write_text(kept, map_text(code))


def refuse_other_map(root: Path, address: str, module: str, code: CodeMap) -> None:
    """LockstepError where the workspace's map is not that of the code which a job would run."""
    path = map_path(module)
    changed = changed_files(_read(root / path) or {}, code)
    if changed:
        names = [*changed][:_MOST_NAMED] + ["..."] * (len(changed) > _MOST_NAMED)
        raise LockstepError(
            f"{address}: {path} does not have the code as it is now ({', '.join(names)}), so DVC "
            "would record the outputs under other code: run `dvc repro code` first"
        )


class KnownMaps:
    """Finds a map by its md5; git is asked once, when nothing else has it."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._committed: dict[str, CodeMap] | None = None

    def get(self, md5: str | None) -> CodeMap | None:
        """None where no trace of it is left."""
        if not md5:
            return None
        code = _read(_kept(self._repository, md5))
        if code is None:
            if self._committed is None:
                texts = [*self._of_workspace(), *_committed(self._repository.root)]
                parsed = filter(None, map(_parse, texts))
                self._committed = {version_of(code): code for code in parsed}
            code = self._committed.get(md5)
        return code

    def _of_workspace(self) -> Iterator[str]:
        for path in sorted((self._repository.root / CODE_STAGE).glob("*.json")):
            yield path.read_text(encoding="utf-8", errors="replace")


def _kept(repository: Repository, md5: str) -> Path:
    return repository.home / "code_maps" / f"{md5}.json"


def _read(path: Path) -> CodeMap | None:
    try:
        return _parse(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None


def _parse(text: str) -> CodeMap | None:
    """A map; None of what a person, or a merge, has left there instead."""
    try:
        values = json.loads(text)
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _committed(root: Path) -> list[str]:
    """Every map that a commit of any ref has, experiments included."""
    listed = git(root, "log", "--all", "--format=", "--raw", "--no-abbrev", "--", CODE_STAGE)
    rows = (line.split() for line in (listed or "").splitlines())
    blobs = dict.fromkeys(row[3] for row in rows if len(row) > 3 and row[3].strip("0"))
    return [text for _, text in blob_contents(root, blobs)]
