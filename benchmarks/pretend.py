"""A clone in which every stage has run, as far as DVC can tell, without running any."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from dvc.utils.serialize import dumps_yaml

from pipelines.base.repository import Repository
from pipelines.dvc_repo.code_stage import CodeStage
from pipelines.dvc_repo.definitions import read_definitions
from pipelines.dvc_repo.graph import connect, open_repo
from pipelines.dvc_repo.lock_text import LOCK_HEAD
from pipelines.dvc_repo.staleness import Workspace
from pipelines.identity.code import CODE_STAGE
from pipelines.identity.hashing import HashCache
from pipelines.identity.map_files import write_maps
from stages.contracts.catalog import STAGES


def pretend_to_run(clone: Path, contents: Mapping[str, str] | None = None) -> None:
    """Write outputs, cache and dvc.lock; `contents` by path, where it matters what they are."""
    with open_repo(clone) as repo:
        definitions = read_definitions(repo)
        workspace = Workspace.read(repo, CodeStage())
        cache = Path(repo.cache.local.path)
    hashes, params, lock = HashCache(), dict[str, str](), [LOCK_HEAD]
    inputs: dict[str, str] = {}
    write_maps(Repository(clone), [stage.module for stage in STAGES.values()])
    for address in connect(definitions):
        stage = definitions[address]
        for out in stage.outs if address != CODE_STAGE else ():
            (clone / out.path).parent.mkdir(parents=True, exist_ok=True)
            content = (contents or {}).get(out.path, out.path)
            (clone / out.path).write_text(content, encoding="utf-8")
            _keep(cache, content.encode())
        keys = tuple(sorted(stage.params))
        if str(keys) not in params:
            values = {"params.yaml": {key: workspace.param(key) for key in keys}}
            params[str(keys)] = dumps_yaml({"params": values}).replace("\n", "\n    ")
        for path in stage.deps:
            if path not in inputs:
                inputs[path] = _item(clone, path, hashes)
        lock += [f"  {address}:\n    cmd: {stage.cmd}\n    deps:\n"]
        lock += [inputs[path] for path in sorted(stage.deps)]
        lock += ["    ", params[str(keys)].rstrip(" ")] if keys else []
        lock += ["    outs:\n"]
        lock += [_item(clone, out.path, hashes) for out in sorted(stage.outs, key=lambda o: o.path)]
    (clone / "dvc.lock").write_text("".join(lock), encoding="utf-8")


def _item(clone: Path, path: str, hashes: HashCache) -> str:
    md5, place = hashes.of(clone / path), clone / path
    files = [file for file in place.rglob("*") if file.is_file()] if place.is_dir() else [place]
    size = sum(file.stat().st_size for file in files)
    count = f"      nfiles: {len(files)}\n" if place.is_dir() else ""
    return f"    - path: {path}\n      hash: md5\n      md5: {md5}\n      size: {size}\n{count}"


def _keep(cache: Path, content: bytes) -> None:
    md5 = hashlib.md5(content).hexdigest()
    place = cache / md5[:2] / md5[2:]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    place.chmod(0o444)
