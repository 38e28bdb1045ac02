"""The text of dvc.lock, and of an entry of DVC's run cache, read faster than YAML is.

A graph of a hundred iterations has 150,000 lines of dvc.lock, which take a YAML parser seconds. DVC
writes nearly all of them in one form, of which a pattern reads the values. A stage that has
anything else is parsed as YAML, so the result is always what YAML says.
"""

import re
from functools import lru_cache
from typing import Any

from ruamel.yaml import YAML

_PATH = r"(?!(?i:true|false|yes|no|on|off|null|y|n)\n)[A-Za-z_][A-Za-z0-9_./@-]*"
_MD5 = r"(?=[0-9e]*[a-df])[0-9a-f]{32}(?:\.dir)?"
"""With a letter that keeps it from being a number."""
_SIZE = r"0|[1-9][0-9]*"
_ITEM = re.compile(
    rf"- path: ({_PATH})\n  hash: md5\n  md5: ({_MD5})\n  size: ({_SIZE})\n"
    rf"(?:  nfiles: ({_SIZE})\n)?(?:  isexec: (true)\n)?"
)
_STAGE = re.compile(r"^  (?=\S)", re.MULTILINE)
_NAME = re.compile(r"([A-Za-z_][\w@.-]*):\n")
_BODY = re.compile(r"  .*\n(?:    .*\n)+")
_CMD = re.compile(r"cmd: ([A-Za-z]+ [A-Za-z0-9_./@ -]*[A-Za-z0-9])\n")
_SECTIONS = re.compile(
    r"(cmd: .+\n)(?:deps:\n((?:[- ] .*\n)+))?(params:\n(?: .*\n)+)?(?:outs:\n((?:[- ] .*\n)+))?"
)
LOCK_HEAD = "schema: '2.0'\nstages:\n"


def parse_lock(text: str) -> Any:
    """What YAML makes of dvc.lock."""
    parts = split_lock(text)
    if parts is None:
        return _yaml(text)
    stages = {}
    for name, part in parts.items():
        body = part.split("\n", 1)[1]
        stages[name] = parse_stage(body.replace("\n    ", "\n").removeprefix("    "))
    return {"schema": "2.0", "stages": stages}


def split_lock(text: str) -> dict[str, str] | None:
    """The text of each stage, below its name; None where it is not as DVC writes it."""
    if not text.startswith(LOCK_HEAD) or not text.endswith("\n"):
        return None
    if ": &" in text or "- &" in text:
        return None  # a value that several stages have in common, written in the first of them
    first, *rest = _STAGE.split(text[len(LOCK_HEAD) :])
    named = [_NAME.match(part) for part in rest]
    if first or not rest or not all(named):
        return None
    parts = {found[1]: f"  {part}" for found, part in zip(named, rest, strict=True) if found}
    # Below a stage's name all lines are further in: what is not is a comment, or a blank line.
    whole = all(_BODY.fullmatch(part) for part in parts.values())
    return parts if whole and len(parts) == len(rest) else None


def parse_stage(text: str) -> Any:
    """What YAML makes of one stage: its command, its params, and the hashes of all it touched."""
    sections = _SECTIONS.fullmatch(text)
    if sections is None:
        return _yaml(text)
    cmd, deps, params, outs = sections.groups()
    read = {"deps": _items(deps), "outs": _items(outs)}
    if None in read.values():
        return _yaml(text)
    plain = _CMD.fullmatch(cmd)
    stage: dict[str, Any] = {"cmd": plain[1]} if plain else _yaml(cmd)
    stage |= {"deps": read["deps"]} if deps else {}
    stage |= _small_yaml(params) if params else {}
    return stage | ({"outs": read["outs"]} if outs else {})


def _items(section: str | None) -> list[dict[str, Any]] | None:
    """The paths of a section with their hashes; None where a line of it is in no known form."""
    items: list[dict[str, Any]] = []
    end = 0
    for found in _ITEM.finditer(section or ""):
        if found.start() != end:
            return None
        end = found.end()
        path, md5, size, nfiles, isexec = found.groups()
        item: dict[str, Any] = {"path": path, "hash": "md5", "md5": md5, "size": int(size)}
        if nfiles:
            item["nfiles"] = int(nfiles)
        if isexec:
            item["isexec"] = True
        items.append(item)
    return items if end == len(section or "") else None


@lru_cache(maxsize=4096)
def _small_yaml(text: str) -> Any:
    """The iterations of a stage have the same params, so few of these texts are different."""
    return _yaml(text)


def _yaml(text: str) -> Any:
    return YAML(typ="safe", pure=False).load(text)
