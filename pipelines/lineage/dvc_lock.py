"""dvc.lock, read stage by stage.

DVC writes a stage's record as a block of lines below a key that is indented by two spaces. A commit
changes few of them, so each distinct block is read once, however many commits have it. Most of a
block is lists of paths and hashes, which a regular expression reads a hundred times as fast as a
YAML parser; anything in another form goes to the parser. So a long history stays fast to read.
"""

import re
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipelines.identity.code import CODE_STAGE
from pipelines.lineage.stage_run import flatten

Record = Mapping[str, Mapping[str, Any]]
"""`params`, `inputs` and `outs` of a stage; `code` has its code map, by path and hash."""

_HEAD = re.compile(r"(?:schema: '2\.0'\n)?stages:\n")
_STAGE = re.compile(r"^  (?=[^ #\n])", re.MULTILINE)
_NAME = re.compile(r"  ([A-Za-z_][\w@.-]*):\n")
_SECTION = re.compile(r"^    (?=[a-z])", re.MULTILINE)
_LIST = re.compile(r"    (?:deps|outs):\n((?:    - path: [^\n]+\n(?:      \w+: [^\n]+\n)*)*)")
_ITEM = re.compile(r"    - path: ([\w.][\w./@ -]*)\n((?:      \w+: [^\n]+\n)*)")
_HASH = re.compile(r"      (?:md5|etag|checksum): '?([\w.-]+)'?\n")


class LockReader:
    """Reads dvc.lock files, and remembers the blocks it has seen."""

    def __init__(self) -> None:
        self._blocks: dict[str, dict[str, Record]] = {}
        self._params: dict[str, dict[str, Any]] = {}

    def read(self, text: str) -> dict[str, Record]:
        """The record of each stage; equal records are the same object. ValueError if invalid."""
        head = _HEAD.match(text)
        starts = [match.start() for match in _STAGE.finditer(text, head.end())] if head else []
        if head is None or starts[:1] != [head.end()]:
            return _without_code(_parse(text))
        records: dict[str, Record] = {}
        for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
            block = text[start:end]
            if block not in self._blocks:
                self._blocks[block] = self._plain(block) or _parse(f"stages:\n{block}")
            records |= self._blocks[block]
        return _without_code(records)

    def _plain(self, block: str) -> dict[str, Record] | None:
        """A block in the form that DVC writes; None where it has another."""
        name = _NAME.match(block)
        if name is None:
            return None
        starts = [match.start() for match in _SECTION.finditer(block, name.end())]
        if starts[:1] != [name.end()]:
            return None
        lists: dict[str, dict[str, str]] = {"deps": {}, "outs": {}}
        params: dict[str, Any] = {}
        for start, end in zip(starts, [*starts[1:], len(block)], strict=True):
            section = block[start:end]
            kind = section.split(":", 1)[0].strip()
            if kind in lists:
                hashes = _paths(section)
                if hashes is None:
                    return None
                lists[kind] = hashes
            elif kind == "params":
                if section not in self._params:
                    self._params[section] = _params(_load(section).get("params"))
                params = self._params[section]
        return {name[1]: _record(params, lists["deps"], lists["outs"])}


def _paths(section: str) -> dict[str, str] | None:
    """The paths and hashes of a plain list."""
    whole = _LIST.fullmatch(section)
    if whole is None:
        return None
    items = list(_ITEM.finditer(whole[1]))
    if sum(len(item[0]) for item in items) != len(whole[1]):
        return None
    hashes = ((item[1], _HASH.search(item[2])) for item in items)
    return {path: digest[1] if digest else "" for path, digest in hashes}


def _load(text: str) -> dict[str, Any]:
    try:
        values = YAML(typ="safe", pure=False).load(text)
    except YAMLError as error:
        raise ValueError(f"not readable as YAML: {str(error).splitlines()[0]}") from None
    return values if isinstance(values, dict) else {}


def _parse(text: str) -> dict[str, Record]:
    """Any dvc.lock, by the parser."""
    stages = _load(text).get("stages") or {}
    try:
        return {
            str(name): _record(
                _params(values.get("params")),
                *(
                    {item["path"]: _hash(item) for item in values.get(k) or ()}
                    for k in ("deps", "outs")
                ),
            )
            for name, values in stages.items()
        }
    except (AttributeError, KeyError, TypeError):
        raise ValueError("its stages are not as DVC writes them") from None


def _params(files: Mapping[str, Any] | None) -> dict[str, Any]:
    sections = (flatten(section or {}) for section in (files or {}).values())
    return {key: value for section in sections for key, value in section.items()}


def _record(params: dict[str, Any], deps: dict[str, str], outs: dict[str, str]) -> Record:
    return {
        "params": params,
        "inputs": {path: digest for path, digest in deps.items() if not is_code(path)},
        "code": {path: digest for path, digest in deps.items() if is_code(path)},
        "outs": outs,
    }


def _hash(item: Mapping[str, Any]) -> str:
    return str(item.get("md5") or item.get("etag") or item.get("checksum") or "")


def is_code(path: str) -> bool:
    """Whether a dependency is a code map."""
    return path.startswith(f"{CODE_STAGE}/")


def _without_code(records: dict[str, Record]) -> dict[str, Record]:
    """The stages that make artifacts: code is what a stage runs, not what it reads."""
    return {stage: record for stage, record in records.items() if stage != CODE_STAGE}
