"""`lockstep verify`: compare every byte of the artifacts with the hashes in dvc.lock.

Nothing is trusted: no time stamp, no cached hash, no read-only bit. Both copies of each output are
read, the one in the workspace and the one in DVC's cache; of a folder each file that the cache's
listing names, once the listing itself has been verified. Nothing is changed: each finding comes
with the command that fixes it.

Only outputs are checked. Whether they are up to date with code, data and params is a different
question, which `dvc status` and `lockstep plan` answer.
"""

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.base.repository import Repository
from pipelines.dvc_repo.cache_objects import hash_in_name, listed_files, object_path, objects_in
from pipelines.dvc_repo.graph import open_repo
from pipelines.dvc_repo.pruned import read_pruned
from pipelines.dvc_repo.recorded import Choice, Output, choose, read_outputs
from pipelines.identity.digests import Digest, Unreadable, digests
from pipelines.identity.hashing import hash_listing
from pipelines.ledger.entry import Ledger
from pipelines.results import findings
from pipelines.results.findings import Finding, Kind

Read = Mapping[Path, Digest | Unreadable]


@dataclass(frozen=True)
class Verification:
    """What was read, and what is wrong with it."""

    findings: list[Finding]
    outputs: int
    files: int
    num_bytes: int
    skipped: list[str]
    """Stages skipped because a job of theirs is running and changes their outputs."""
    pruned: list[str]
    """Outputs that are gone because somebody removed them on purpose."""

    def as_json(self) -> dict[str, Any]:
        return {
            "findings": [finding.as_json() for finding in self.findings],
            "outputs": self.outputs,
            "files": self.files,
            "bytes": self.num_bytes,
            "skipped": self.skipped,
            "pruned": self.pruned,
        }


def verify(
    repository: Repository,
    targets: list[str],
    *,
    whole_cache: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Read the targets (all outputs by default) and return what is not as recorded.

    `whole_cache` adds every object of DVC's cache, also those that dvc.lock does not name.
    """
    root = repository.root
    with open_repo(root) as repo:
        cache = Path(repo.cache.local.path)
        chosen = choose(root, read_outputs(root, repo), targets)
    latest = Ledger(repository.jobs).latest()
    busy = {stage for stage, entry in latest.items() if entry.state().alive}
    skipped = sorted({choice.output.stage for choice in chosen} & busy)
    looks = [_look(root, cache, choice) for choice in chosen if choice.output.stage not in busy]
    looks = [look for look in looks if look.output.md5 or look.present or targets]
    removed = read_pruned(root)
    recorded = {look.output.path: look.output.md5 for look in looks}
    pruned = [path for path, md5 in removed.items() if recorded.get(path) == md5]
    looks = [look for look in looks if look.output.path not in pruned]
    objects = list(objects_in(cache)) if whole_cache else []
    paths = [*(path for look in looks for path in look.paths()), *objects]
    read = digests(paths, progress, from_disk=True)
    results = [finding for look in looks for finding in look.judge(read)]
    reported = {finding.path for finding in results}
    results += [finding for finding in _rotted(objects, read) if finding.path not in reported]
    files = {item.identity: item.size for item in read.values() if isinstance(item, Digest)}
    unique = list(dict.fromkeys(results))
    return Verification(unique, len(looks), len(files), sum(files.values()), skipped, pruned)


@dataclass(frozen=True)
class _Look:
    """One output: which files to read, and their expected hashes."""

    root: Path
    cache: Path
    output: Output
    present: list[str]
    """The files that exist."""
    listed: dict[str, str] | None
    """The md5 of each recorded file; None where a folder's listing is not available."""

    def paths(self) -> Iterator[Path]:
        """Every file to read."""
        if self.output.md5 is None:
            return
        yield from (self.root / path for path in self.present)
        for path, md5 in (self.listed or {}).items():
            yield self.root / path
            if self.output.in_cache:
                yield object_path(self.cache, md5)

    def judge(self, read: Read) -> Iterator[Finding]:
        """What is wrong with it."""
        output = self.output
        if output.md5 is None:
            remedy = findings.compute(output)
            yield Finding(Kind.UNRECORDED, output.path, output.stage, remedies=remedy)
        elif self.listed is None:
            yield from self._judge_unlisted(read)
        elif self.present or not self._is_absent():
            # First: DVC restores nothing beside a file that it does not know.
            yield from self._extras(read)
            for path, md5 in self.listed.items():
                yield from self._judge_file(path, md5, read)
        elif output.current:
            yield from self._absent(read)

    def _is_absent(self) -> bool:
        """Whether the output is missing; an empty folder may be a complete output."""
        place = self.root / self.output.path
        return bool(self.listed) or not place.is_dir()

    def _judge_file(self, path: str, md5: str, read: Read) -> Iterator[Finding]:
        here, place = read.get(self.root / path), object_path(self.cache, md5)
        kept = read.get(place) if self.output.in_cache else None
        stage, linked = self.output.stage, _same_file(here, kept)
        refill = findings.refill(path, str(place))
        if kept and not _holds(kept, md5) and not linked:
            remedy = refill if _holds(here, md5) else self._again(read)
            yield Finding(Kind.ROTTED, str(place), stage, f"of {path}; {_describe(kept)}", remedy)
        if _holds(here, md5):
            if self.output.in_cache and self.output.current and not kept:
                yield Finding(Kind.UNCACHED, path, stage, remedies=refill)
        elif here is None:
            to_be_had = _holds(kept, md5) or not self.output.in_cache
            kind = Kind.MISSING if to_be_had else Kind.LOST
            yield Finding(kind, path, stage, remedies=self._again(read))
        else:
            detail = f"recorded {md5}, {_describe(here)}"
            if linked:
                detail += "; it is a link to DVC's cache object, so both are changed"
            elif isinstance(here, Digest) and object_path(self.cache, here.md5).exists():
                detail += f"; {_OTHER_RECORD}"
            yield Finding(Kind.CHANGED, path, stage, detail, self._again(read))

    def _again(self, read: Read) -> tuple[str, ...]:
        """How to restore the recorded bytes of the whole output at once.

        DVC refuses to restore a file while another beside it is wrong.
        """
        output, listed = self.output, self.listed or {}
        if not output.current:
            return findings.remove(output.path)
        bad = {p: m for p, m in listed.items() if not _holds(read.get(self.root / p), m)}
        here = [path for path in bad if os.path.lexists(self.root / path)]
        if not output.in_cache:
            in_git = _git_blob_md5(self.root, output.path) == output.md5
            return findings.from_git(output) if in_git else findings.compute(output, *here)
        kept = {m: read.get(object_path(self.cache, m)) for m in bad.values()}
        if all(_holds(digest, md5) for md5, digest in kept.items()):
            return findings.checkout(output, *here)
        rotted = [m for m, digest in kept.items() if digest and not _holds(digest, m)]
        places = [str(object_path(self.cache, md5)) for md5 in rotted]
        return findings.bring_back(output, *here, *places)

    def _absent(self, read: Read) -> Iterator[Finding]:
        """One finding for a missing output, not one for each of its files."""
        output, remedy = self.output, self._again(read)
        kept = {m: read.get(object_path(self.cache, m)) for m in (self.listed or {}).values()}
        for md5, digest in kept.items() if output.in_cache else ():
            if digest and not _holds(digest, md5):
                place, detail = object_path(self.cache, md5), _describe(digest)
                detail = f"of {output.path}; {detail}"
                yield Finding(Kind.ROTTED, str(place), output.stage, detail, remedy)
        whole = all(_holds(digest, md5) for md5, digest in kept.items())
        kind = Kind.MISSING if whole or not output.in_cache else Kind.LOST
        yield Finding(kind, output.path, output.stage, remedies=remedy)

    def _extras(self, read: Read) -> Iterator[Finding]:
        recorded = self.listed or {}
        gone = {md5: path for path, md5 in recorded.items() if path not in self.present}
        for path in self.present:
            if path not in recorded:
                digest = read.get(self.root / path)
                like = gone.get(digest.md5) if isinstance(digest, Digest) else None
                detail = f"it has the content of {like}" if like else ""
                remedy = findings.remove(path)
                yield Finding(Kind.EXTRA, path, self.output.stage, detail, remedy)

    def _judge_unlisted(self, read: Read) -> Iterator[Finding]:
        """A folder without a valid listing: only the hash of the whole can be compared."""
        output = self.output
        assert output.md5 is not None
        place = object_path(self.cache, output.md5)
        kept = [str(place)] if place.exists() else []
        stage = output.stage
        if kept:
            detail = f"the list of the files in {output.path}"
            yield Finding(Kind.ROTTED, kept[0], stage, detail, self._relist(read, kept))
        if not self.present:
            if output.current:
                yield Finding(Kind.LOST, output.path, stage, remedies=self._relist(read, kept))
        elif self._folder_md5(read) != output.md5:
            other = object_path(self.cache, self._folder_md5(read))
            detail = f"recorded {output.md5}, found {self._folder_md5(read)}; "
            lost = "the list of its files is not in DVC's cache, so no file can be named"
            detail += _OTHER_RECORD if other.exists() else lost
            yield Finding(Kind.CHANGED, output.path, stage, detail, self._relist(read, kept))
        elif not kept and output.current:
            remedy = self._relist(read, kept)
            yield Finding(Kind.UNCACHED, output.path, stage, remedies=remedy)

    def _relist(self, read: Read, kept: list[str]) -> tuple[str, ...]:
        output = self.output
        if not output.current:
            return findings.remove(output.path)
        if self._folder_md5(read) == output.md5:
            return findings.relist(output, str(object_path(self.cache, output.md5)))
        here = [output.path] if self.present else []
        return findings.bring_back(output, *here, *kept)

    def _folder_md5(self, read: Read) -> str:
        hashes = {}
        for path in self.present:
            digest = read.get(self.root / path)
            md5 = digest.md5 if isinstance(digest, Digest) else ""
            hashes[path.removeprefix(f"{self.output.path}/")] = md5
        return hash_listing(hashes)


_OTHER_RECORD = (
    "DVC's cache knows this content under its own hash, so it may be dvc.lock that was changed: "
    "see `git diff dvc.lock`"
)


def _look(root: Path, cache: Path, choice: Choice) -> _Look:
    output = choice.output
    present = [path for path in _present(root, output.path) if choice.covers(path)]
    if output.md5 is None or not output.is_folder:
        return _Look(root, cache, output, present, {output.path: str(output.md5)})
    names = listed_files(object_path(cache, output.md5), output.md5)
    if names is None:
        return _Look(root, cache, output, _present(root, output.path), None)
    files = {f"{output.path}/{name}": md5 for name, md5 in names.items()}
    listed = {path: md5 for path, md5 in files.items() if choice.covers(path)}
    if not listed and not present and choice.within != output.path:
        raise LockstepError(f"{choice.within}: no such file in {output.path}, nor in its record")
    return _Look(root, cache, output, present, listed)


def _present(root: Path, path: str) -> list[str]:
    """The file, or every file of the folder, and links to folders, which DVC does not follow."""
    place = root / path
    if not place.is_dir():
        return [path] if os.path.lexists(place) else []
    files = []
    for folder, folders, names in os.walk(place):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        files += [(Path(folder) / name).relative_to(root).as_posix() for name in names + links]
    return sorted(files)


def _rotted(objects: list[Path], read: Read) -> Iterator[Finding]:
    """Corrupted objects that no checked output names; only a remote or the stage has them."""
    for path in objects:
        digest = read.get(path)
        if digest and not _holds(digest, hash_in_name(path)):
            remedy = findings.remove(str(path))
            yield Finding(Kind.ROTTED, str(path), None, _describe(digest), remedy)


def _holds(digest: Digest | Unreadable | None, md5: str) -> bool:
    return isinstance(digest, Digest) and digest.md5 == md5


def _same_file(first: Digest | Unreadable | None, second: Digest | Unreadable | None) -> bool:
    both = isinstance(first, Digest) and isinstance(second, Digest)
    return both and first.identity == second.identity  # type: ignore[union-attr]


def _describe(digest: Digest | Unreadable | None) -> str:
    if isinstance(digest, Digest):
        return f"found {digest.md5} ({digest.size:,} bytes)"
    return f"cannot be read: {digest.reason}" if digest else "found nothing"


def _git_blob_md5(root: Path, path: str) -> str | None:
    """The md5 of the file that git would check out."""
    done = subprocess.run(
        ["git", "cat-file", "blob", f":./{path}"], cwd=root, capture_output=True, check=False
    )
    return hashlib.md5(done.stdout).hexdigest() if done.returncode == 0 else None
