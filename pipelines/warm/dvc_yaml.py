"""The YAML that DVC reads and writes, in a forked process: what has not changed costs nothing.

DVC parses params.yaml and dvc.yaml several times a stage, and writes all of dvc.lock anew for each
stage that it records: at 17 stages half of its own time, and more with each stage. Here a text is
parsed once, and of dvc.lock only the stage that is recorded is written anew. The bytes are DVC's.

No person writes into dvc.lock, so there are no comments to keep, for which DVC takes a loader that
is twenty times slower.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import dvc.dvcfile
from dvc.utils import strictyaml
from dvc.utils.serialize import _yaml
from dvc.utils.serialize._common import _dump_data
from ruamel.yaml.error import YAMLError

from pipelines.dvc_repo.lock_text import LOCK_HEAD, parse_lock, split_lock

LOCK = "dvc.lock"
_plain_parse: Callable[..., Any] = _yaml.parse_yaml


def use_quick_yaml() -> None:
    """In this process, and in those that are forked from it."""
    _yaml.parse_yaml = strictyaml.parse_yaml = parse
    keeping_comments = dvc.dvcfile.modify_yaml

    @contextmanager
    def modify(path: str, fs: Any = None) -> Iterator[dict[str, Any]]:
        how = modify_lock if Path(path).name == LOCK else keeping_comments
        with how(path, fs) as data:
            yield data

    dvc.dvcfile.modify_yaml = modify


def parse(text: Any, path: Any, typ: str = "safe") -> Any:
    """What DVC's `parse_yaml` makes of a text; whoever asks may change it."""
    if typ != "safe":
        return _plain_parse(text, path, typ)
    parsed = _parsed(text, str(path))
    if Path(path).name != LOCK or split_lock(text) is None:
        return deepcopy(parsed)
    # Stages with equal params have them in common here, which DVC would write as a YAML alias.
    return {**parsed, "stages": {name: deepcopy(it) for name, it in parsed["stages"].items()}}


@lru_cache(maxsize=16)
def _parsed(text: Any, path: str) -> Any:
    if Path(path).name == LOCK:
        try:
            return parse_lock(text) or {}
        except YAMLError:
            pass  # DVC says what is wrong
    return _plain_parse(text, path)


@contextmanager
def modify_lock(path: str, fs: Any) -> Iterator[dict[str, Any]]:
    """DVC's `modify_yaml` of a dvc.lock."""
    text = ""
    if fs.exists(path):
        with fs.open(path, encoding="utf-8") as file:
            text = file.read()
    data = parse(text, path) if text else {}
    before = dict(data.get("stages") or {})
    yield data
    _dump_data(path, _written(data, before, text), _write, fs=fs)


def _write(text: str, stream: Any) -> None:
    stream.write(text)


def _written(data: Mapping[str, Any], before: Mapping[str, Any], text: str) -> str:
    """The whole as DVC writes it; stages that are still what was read keep their text."""
    parts = split_lock(text)
    if parts is None or data.keys() != {"schema", "stages"}:
        return _dumped(data)
    return LOCK_HEAD + "".join(
        parts[name] if stage is before.get(name) else _dumped_stage(name, stage)
        for name, stage in data["stages"].items()
    )


def _dumped_stage(name: str, stage: Any) -> str:
    return _dumped({"schema": "2.0", "stages": {name: stage}}).removeprefix(LOCK_HEAD)


def _dumped(data: Any) -> str:
    stream = io.StringIO()
    _yaml._dump(data, stream)
    return stream.getvalue()
