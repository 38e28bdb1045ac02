"""What a job has on its node's own disk: copies of its inputs, and its newest checkpoint.

One process of a node copies an input, under its hash, and the next jobs on the node find it there.
Always true:
- What is read has the hash that is in the spec: every byte of a copy is hashed when it was made,
  and again by each job that is about to read it. One that has rotted is made anew.
- All ranks of a job read an input from the same path: from a local disk only if each node has it.
- A copy that a job reads is not removed before that job ends.
- Nothing fails for want of a local disk: the job then reads the shared folder, and says why.
"""

import errno
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.owners import explain
from pipelines.config.stage_in import Staged
from pipelines.identity.hashing import Interrupted, files_of, hash_bytes
from pipelines.identity.spec import Artifact, Spec
from pipelines.ledger.launch import Launch
from pipelines.ledger.task import Task
from pipelines.worker.copying import copy_files
from pipelines.worker.local_disk import POLL_S, Held, LocalDisk, open_disk
from stages.context import Context, LocalScratch, Stopped
from stages.contracts.base import Processes
from stages.contracts.catalog import STAGES
from stages.engines.processes.node import node_name
from stages.progress import seconds

_SUFFIX = ".stage-in.json"
"""After the node's name: what it has on its own disk, for the ranks of a job."""
_LARGE = 100_000_000
"""A smaller input is there before one would look how far it is."""
PHASE = "MB to the node's disk"


class _Differs(Exception):
    """What was copied does not have the hash that the spec names."""


@dataclass
class Staging:
    """What one process has on its node's own disk."""

    spec: Spec
    launch: Launch
    task: Task
    context: Context
    local: dict[str, Path] = field(default_factory=dict)
    """The inputs that are there."""
    _scratch: Path | None = None
    """Where checkpoints are written first."""
    _held: dict[Path, Held] = field(default_factory=dict)

    @property
    def shared(self) -> dict[str, Path]:
        root = self.launch.root
        return {name: root / artifact.path for name, artifact in self.spec.inputs.items()}

    @property
    def inputs(self) -> dict[str, Path]:
        """Where each is to be read."""
        return {**self.shared, **self.local}

    @property
    def left(self) -> list[str]:
        """The inputs that are read from the shared folder."""
        return [name for name in self.spec.inputs if name not in self.local]

    @property
    def _what(self) -> list[Staged]:
        settings = self.launch.resources.stage_in
        what = settings.what if settings else []
        return what if _trains(self.spec) else [each for each in what if each is Staged.INPUTS]

    @cached_property
    def _disk(self) -> LocalDisk:
        assert self.launch.resources.stage_in
        return open_disk(self.launch.resources.stage_in)

    def bring(self) -> None:
        """Have it all there, for every process that the job has on this node."""
        if not self._what:
            return
        try:
            _ = self._disk
        except OSError as error:
            _warn(f"this node's own disk is not used (`stage_in`): {explain(error)}")
        else:
            if Staged.INPUTS in self._what:
                for name, artifact in self.spec.inputs.items():
                    self._try_to_bring(name, artifact)
            if Staged.CHECKPOINTS in self._what:
                self._bring_scratch()
        if self.task.world > 1:
            assert self.context.heartbeats
            found = {"inputs": _texts(self.local), "scratch": str(self._scratch or "")}
            atomic.write_json(self.context.heartbeats / f"{node_name()}{_SUFFIX}", found)

    def agree(self) -> None:
        """Once all nodes have brought theirs: use what every node has at the same path."""
        if not self._what:
            return
        if self.task.world > 1:
            self._take_what_all_nodes_have()
        if self._scratch:
            nodes = self.launch.resources.nodes
            self.context.local = LocalScratch(self._scratch, self._disk.make_room, nodes)

    def _take_what_all_nodes_have(self) -> None:
        first, *others = self._of_nodes()
        local, self.local = self.local, {}
        for name, path in first["inputs"].items():
            if all(other["inputs"].get(name) == path for other in others):
                self.local[name] = Path(path)
        for name in local.keys() - self.local.keys():
            _warn(f"the input `{name}` is read from the shared folder: a node does not have it")
        same = all(other["scratch"] == first["scratch"] for other in others)
        if self._scratch and not same:
            _warn("checkpoints go to the shared folder only: a node has them elsewhere or not")
        self._scratch = Path(first["scratch"]) if first["scratch"] and same else None
        # The process that brought it may end before this one.
        paths = [path.parent for path in self.local.values()]
        for path in [*paths, *([self._scratch] if self._scratch else [])]:
            if path not in self._held and (held := self._disk.hold(path.name)):
                self._held[path] = held

    def in_users_words(self, text: str) -> str:
        """A message, with the paths that people know."""
        for name, path in self.local.items():
            text = text.replace(str(path), str(self.shared[name]))
        return text

    def end(self, *, completed: bool) -> None:
        """Let go of it; who has its result needs no checkpoint any more."""
        for held in self._held.values():
            held.close()
        if completed and self._scratch and self.task.reads_for_its_node:
            with suppress(OSError):
                self._disk.remove(self._scratch.name)

    def _bring_scratch(self) -> None:
        try:
            held = self._disk.use(
                f"checkpoints.{_name_of(self.context.scratch)}", 0, lambda _: None
            )
        except OSError as error:
            _warn(f"checkpoints go to the shared folder only: {explain(error)}")
            return
        self._held[held.path], self._scratch = held, held.path

    def _try_to_bring(self, name: str, artifact: Artifact) -> None:
        try:
            self._bring(name, artifact)
        except OSError as error:
            _warn(f"the input `{name}` is read from the shared folder: {explain(error)}")
        except _Differs:
            # The check of what is read from there says more.
            _warn(f"the input `{name}` was copied, and the copy is not what it should be")
        except Interrupted as error:
            raise Stopped(f"stopped {error}") from error

    def _bring(self, name: str, artifact: Artifact) -> None:
        source = self.shared[name]
        files = files_of(source) if source.is_dir() else {"": source}
        size = sum(path.stat().st_size for path in files.values())
        entry = f"{artifact.hash}.{source.name}"
        begun, made = time.monotonic(), False

        def fill(folder: Path) -> None:
            nonlocal made
            target = folder / source.name
            if source.is_dir():
                target.mkdir()
            copy_files({path: target / part for part, path in files.items()}, self._say(size))
            self._check(target, artifact)
            made = True

        for _ in range(2):
            held = self._disk.use(entry, size, fill, self._say(size))
            try:
                if not made:
                    self._check(held.path / source.name, artifact)
            except (_Differs, OSError) as error:
                held.close()
                _warn(f"{held.path} is damaged, and is copied again ({error})")
                if not self._disk.remove(entry):
                    raise _Differs from error
                continue
            except BaseException:
                held.close()
                raise
            self._held[held.path], self.local[name] = held, held.path / source.name
            took = seconds(time.monotonic() - begun)
            how = "copied to" if made else "found on"
            print(f"{name}: {how} this node's disk, {size / 1e6:.0f} MB in {took}", flush=True)
            return

    def _check(self, path: Path, artifact: Artifact) -> None:
        if hash_bytes(path, self.context.should_stop) != artifact.hash:
            raise _Differs(f"its hash is not {artifact.hash}")

    def _say(self, size: int) -> Callable[[int], None]:
        def say(done: int) -> None:
            if self.context.should_stop():
                raise Stopped("while its inputs were copied")
            if size >= _LARGE:
                self.context.progress(min(done, size) // 10**6, size // 10**6, PHASE)

        return say

    def _of_nodes(self) -> Iterator[dict[str, Any]]:
        """What each node has; an element says so of inputs by name, and of the scratch."""
        folder = self.context.heartbeats
        assert folder
        # All have written theirs before the ranks met; a shared folder may show it late.
        while len(found := sorted(folder.glob(f"*{_SUFFIX}"))) < self.launch.resources.nodes:
            if self.context.should_stop():
                raise Stopped("before the ranks knew what their nodes have")
            time.sleep(POLL_S)
        for path in found:
            yield atomic.load_json(path)


@contextmanager
def staging(spec: Spec, launch: Launch, task: Task, context: Context) -> Iterator[Staging]:
    """What this process has on its node stays there until the block ends."""
    here = Staging(spec, launch, task, context)
    try:
        yield here
    finally:
        here.end(completed=False)


def _trains(spec: Spec) -> bool:
    stage = STAGES[spec.name]
    return stage.processes is Processes.TOGETHER and not stage.reads


def _name_of(scratch: Path) -> str:
    """What a scratch is called on every node: that of another run of the stage is another one."""
    path = scratch / ".name"
    if not path.exists():
        aside = atomic.unique(path)
        atomic.write_text(aside, secrets.token_hex(8))  # synced: an empty one is that of many
        try:
            os.link(aside, path)
        except FileExistsError:
            pass
        finally:
            aside.unlink()
    name = path.read_text(encoding="utf-8")
    if not re.fullmatch("[0-9a-f]{16}", name):
        raise OSError(errno.EINVAL, "damaged: remove it", str(path))
    return name


def _texts(paths: Mapping[str, Path]) -> dict[str, str]:
    return {name: str(path) for name, path in paths.items()}


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
