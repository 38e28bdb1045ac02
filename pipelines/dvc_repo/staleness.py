"""What is stale about a stage, as `dvc status` has it, and whether DVC could restore it.

DVC compares what dvc.lock says a stage read and made with what is there now, and looks for its
outputs in the cache. A stale stage is restored instead of run when the run cache, or dvc.lock
itself, has the outputs for exactly its command, params and inputs. Both are answered here from the
same files that DVC goes by.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ruamel.yaml.error import YAMLError

from pipelines.base.repository import Repository
from pipelines.dvc_repo.code_stage import CodeStage
from pipelines.dvc_repo.contents import Content, Contents
from pipelines.dvc_repo.definitions import Definition, Unsupported, ignored_names
from pipelines.dvc_repo.lock_file import read_stages
from pipelines.dvc_repo.lock_text import parse_stage
from pipelines.dvc_repo.pruned import read_pruned
from pipelines.identity.hashing import HashCache

_ITEM_KEYS = {"path", "hash", "md5", "size", "nfiles", "isexec"}
_NOT_IN_THE_KEY = ["size", "nfiles"]
"""DVC leaves them out wherever they are, even a param of that name."""
_MISSING = object()
NEEDED_AGAIN = "was pruned and is needed again"

Lock = Mapping[str, Any]
"""What dvc.lock, or the run cache, has of one stage."""


@dataclass(frozen=True)
class Workspace:
    """A clone as DVC would find it."""

    root: Path
    contents: Contents
    params: Any
    """params.yaml, or None where there is none."""
    lock: Mapping[str, Lock]
    runs: Path
    """DVC's run cache."""
    hashes: HashCache
    code: CodeStage
    pruned: Mapping[str, str]
    """The hash of outputs that were removed on purpose, by path."""
    needed: frozenset[str]
    """Those of them that are to be made again, because a stage that will run reads them."""

    @classmethod
    def read(
        cls,
        repo: Any,
        code: CodeStage,
        needed: frozenset[str] = frozenset(),
        values: Mapping[str, Any] | None = None,
    ) -> "Workspace":
        """Unsupported where DVC's settings, or its lock file, are read by DVC alone.

        `values`: params to go by instead of those of params.yaml.
        """
        from dvc.utils.serialize import load_yaml

        root = Path(repo.root_dir)
        hashes = HashCache(Repository(root).home / "hashes.json", _known_to(repo))
        params = root / "params.yaml"
        if values is None:
            values = load_yaml(str(params)) if params.exists() else None
        return cls(
            root=root,
            contents=Contents(root, Path(repo.cache.local.path), hashes, ignored_names(root)),
            params=values,
            lock=read_stages(root),
            runs=Path(repo.stage_cache.cache_dir),
            hashes=hashes,
            code=code,
            pruned=read_pruned(root),
            needed=needed,
        )

    def hash_paths(self, definitions: Mapping[str, Definition]) -> None:
        """Hash all that the stages read and make, at once."""
        paths = {path for one in definitions.values() for path in one.deps}
        self.contents.read(
            paths.union(out.path for one in definitions.values() for out in one.outs)
        )
        self.hashes.save()

    def is_pruned(self, path: str, recorded: Content | None) -> bool:
        """Whether it is gone on purpose; where it is made again, it is taken to be the same."""
        return recorded is not None and self.pruned.get(path) == recorded.md5

    def predict_code(self) -> None:
        """From here on, the code maps are what the stage that writes them would make of them."""
        for path, version in self.code.versions.items():
            self.contents.predict(path, Content(version))

    def param(self, key: str) -> Any:
        value = self.params
        for part in key.split("."):
            if isinstance(value, list):
                raise Unsupported(f"param {key} goes through a list")
            value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
        return value


@dataclass(frozen=True)
class StageStatus:
    definition: Definition
    workspace: Workspace

    @cached_property
    def lock(self) -> Lock:
        return self.workspace.lock.get(self.definition.address, {})

    def reasons(self) -> list[str]:
        """What DVC's status says, as short phrases; nothing for a stage that is up to date."""
        outs = _recorded(self.lock, "outs")
        if self.definition.outs and not any(out.path in outs for out in self.definition.outs):
            return ["has not run yet"]
        reasons = [*self._changed_deps(), *self._changed_params(), *self._changed_outs(outs)]
        if self.lock and self.lock.get("cmd") != self.definition.cmd:
            reasons.append("changed command")
        return reasons

    def restore(self) -> bool:
        """Whether DVC would bring the outputs from its cache; if so, take them for restored."""
        found = self._outs_to_restore()
        has_object = self.workspace.contents.has_object
        if found is None or not all(has_object(content.md5) for content in found.values()):
            return False
        for path, content in found.items():
            self.workspace.contents.restore(path, content)
        return True

    def _changed_deps(self) -> list[str]:
        recorded = _recorded(self.lock, "deps")
        reasons = []
        for path in dict.fromkeys(self.definition.deps):
            there = self.workspace.contents.now(path)
            known = recorded.get(path)
            if path in self.workspace.code.versions:
                reasons += self.workspace.code.reasons(path, known.md5 if known else None)
            elif self.workspace.is_pruned(path, known):
                continue
            elif there is None or known is None or there.md5 != known.md5:
                what = name_of(path, "input")
                reasons.append(f"{what} {path} {'deleted' if there is None else 'modified'}")
        return reasons

    def _changed_params(self) -> list[str]:
        if not self.definition.params:
            return []
        if self.workspace.params is None:
            return ["input params.yaml deleted"]
        recorded = (self.lock.get("params") or {}).get("params.yaml")
        if recorded is None:
            return ["input params.yaml new"]
        reasons = []
        for key in dict.fromkeys(self.definition.params):
            value = self.workspace.param(key)
            if value is _MISSING:
                reasons.append(f"param {key} deleted")
            elif key not in recorded:
                reasons.append(f"param {key} new")
            elif value != recorded[key]:
                reasons.append(f"param {key} modified")
        return reasons

    def _changed_outs(self, recorded: Mapping[str, Content]) -> list[str]:
        reasons = []
        for out in self.definition.outs:
            known, there = recorded.get(out.path), self.workspace.contents.now(out.path)
            what = name_of(out.path, "output")
            if self.workspace.is_pruned(out.path, known):
                if out.path in self.workspace.needed:
                    reasons.append(f"{what} {out.path} {NEEDED_AGAIN}")
            elif known and out.in_cache and not self.workspace.contents.has_object(known.md5):
                reasons.append(f"{what} {out.path} not in cache")
            elif there is None:
                reasons.append(f"{what} {out.path} deleted")
            elif known is None or there.md5 != known.md5:
                reasons.append(f"{what} {out.path} modified")
        return reasons

    def _outs_to_restore(self) -> dict[str, Content] | None:
        """The outputs that DVC has recorded for what the stage will find, by path."""
        definition = self.definition
        if not (definition.cmd and definition.deps and definition.outs):
            return None
        if any(out.persist or Path(out.path).is_absolute() for out in definition.outs):
            return None
        inputs = {path: self.workspace.contents.later(path) for path in definition.deps}
        params = {key: self.workspace.param(key) for key in definition.params}
        if None in inputs.values() or _MISSING in params.values():
            return None
        recorded = _recorded(self.lock, "deps")
        if (
            self.lock.get("cmd") == definition.cmd
            and all(content == recorded.get(path) for path, content in inputs.items())
            and params == ((self.lock.get("params") or {}).get("params.yaml") or {})
            and {out.path for out in definition.outs} <= _recorded(self.lock, "outs").keys()
        ):
            outs = _recorded(self.lock, "outs")
            return {out.path: outs[out.path] for out in definition.outs}
        return self._in_run_cache(inputs, params)

    def _in_run_cache(
        self, inputs: Mapping[str, Content | None], params: Mapping[str, Any]
    ) -> dict[str, Content] | None:
        """The newest entry of DVC's run cache for these inputs; DVC's own hash is its name."""
        from dvc.utils import dict_sha256

        deps = []
        for path in sorted(self.definition.deps):
            content = inputs[path]
            assert content is not None
            deps.append({"path": path, "hash": "md5", "md5": content.md5})
            if content.is_executable:
                deps[-1]["isexec"] = True  # type: ignore[assignment]
        wanted: dict[str, Any] = {"cmd": self.definition.cmd, "deps": deps}
        if params:
            wanted["params"] = {"params.yaml": dict(params)}
        wanted["outs"] = sorted(out.path for out in self.definition.outs)
        key = dict_sha256(wanted, exclude=_NOT_IN_THE_KEY)
        folder = self.workspace.runs / key[:2] / key
        try:
            # DVC writes an entry aside, in the same folder.
            whole = (path for path in folder.iterdir() if path.suffix != ".tmp")
            newest = max(whole, key=lambda path: path.stat().st_mtime, default=None)
            entry = parse_stage(newest.read_text(encoding="utf-8")) if newest else {}
            return _recorded(entry, "outs") or None
        except (OSError, YAMLError, UnicodeDecodeError, AttributeError, KeyError, TypeError):
            return None  # gone since, or damaged


def _recorded(entry: Lock, key: str) -> dict[str, Content]:
    """Paths with their recorded hashes; Unsupported where they are not as DVC 3 writes them."""
    found = {}
    for item in entry.get(key) or ():
        if item.get("hash") != "md5" or not _ITEM_KEYS.issuperset(item):
            raise Unsupported(f"dvc.lock has {', '.join(item)} of {item['path']}")
        if "md5" in item:
            found[item["path"]] = Content(item["md5"], item.get("isexec", False))
    return found


def name_of(path: str, what: str) -> str:
    return "code" if path.endswith(".py") else what


def _known_to(repo: Any) -> Any:
    """DVC remembers the hashes of what it has read and written itself."""

    def look_up(path: Path) -> str | None:
        _, found = repo.state.get(str(path), repo.fs)
        return str(found.value) if found is not None and found.name == "md5" else None

    return look_up
