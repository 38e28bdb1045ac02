"""A forked DVC reads a YAML file once and writes a stage of dvc.lock alone: the bytes are DVC's."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from dvc.fs import LocalFileSystem
from dvc.utils.serialize import YAMLFileCorruptedError, dumps_yaml, load_yaml
from dvc.utils.serialize._common import _modify_data
from dvc.utils.serialize._yaml import _dump, parse_yaml

from pipelines.warm.dvc_yaml import modify_lock, parse

FS = LocalFileSystem()
OUT = {"path": "artifacts/a", "hash": "md5", "md5": "a" * 32, "size": 7}
EDGES = [[], {}, None, True, 1e-05, "1e3", "yes", "a: b", "ünï", "x " * 60, [1, {"a": [2]}], "\n"]
PARAMS = {"params.yaml": {"seed": 17, "nested": {f"k{i}": v for i, v in enumerate(EDGES)}}}
STAGE = {"cmd": "python -m x", "deps": [OUT], "params": PARAMS, "outs": [{**OUT, "nfiles": 3}]}
STAGES = {"a": STAGE, "b@1": {**STAGE, "cmd": "echo 'x: y'"}, "c": {"cmd": "true"}}
CHANGES: dict[str, dict[str, Any]] = {
    "recorded first": {"d": STAGE},
    "recorded anew": {"b@1": {**STAGE, "outs": [{**OUT, "md5": "b" * 32}]}},
    "recorded as it was": {"a": deepcopy(STAGE)},
    "with a value twice": {"c": {"cmd": "true", "params": {"p": {"x": (v := [1, 2]), "y": v}}}},
    "two of them": {"c": {"cmd": "x " * 50, "deps": [OUT]}, "e": {"cmd": ["a", "b"]}},
    "none": {},
}


def lock_of(stages: dict[str, Any]) -> str:
    """As DVC has written it, stage after stage: no two have a value in common."""
    unshared = {name: deepcopy(stage) for name, stage in stages.items()}
    return dumps_yaml({"schema": "2.0", "stages": unshared})


WITH_ALIASES = dumps_yaml({"schema": "2.0", "stages": STAGES})
BEFORE = {"three": lock_of(STAGES), "empty": lock_of({}), "none": None, "aliases": WITH_ALIASES}


@contextmanager
def modify_as_dvc(path: str) -> Iterator[dict[str, Any]]:
    with _modify_data(path, parse_yaml, _dump, fs=FS) as data:
        yield data


def record(data: dict[str, Any], stages: dict[str, Any]) -> None:
    """As DVC's `Lockfile.dump_stages`."""
    if not data:
        data.update({"schema": "2.0"})
    data["stages"] = data.get("stages", {})
    data["stages"].update(deepcopy(stages))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("before", BEFORE)
def test_a_lock_file_gets_the_bytes_that_dvc_gives_it(
    tmp_path: Path, before: str, change: str
) -> None:
    texts = []
    for name, modify in (("ours", lambda path: modify_lock(path, FS)), ("theirs", modify_as_dvc)):
        path = tmp_path / name / "dvc.lock"
        path.parent.mkdir()
        if (text := BEFORE[before]) is not None:
            path.write_text(text)
        for stages in (CHANGES[change], CHANGES["recorded first"], CHANGES["recorded anew"]):
            with modify(str(path)) as data:
                record(data, stages)
            texts.append(path.read_text())
    assert texts[:3] == texts[3:]


def test_what_a_lock_file_has_besides_stages_stays(tmp_path: Path) -> None:
    path = tmp_path / "dvc.lock"
    path.write_text(dumps_yaml({"schema": "2.0", "datasets": [{"name": "d"}], "stages": STAGES}))
    with modify_lock(str(path), FS) as data:
        record(data, CHANGES["recorded anew"])
    whole = {"schema": "2.0", "datasets": [{"name": "d"}]}
    assert load_yaml(path) == {**whole, "stages": {**STAGES, **CHANGES["recorded anew"]}}


def test_only_the_recorded_stage_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "dvc.lock"
    text = lock_of(STAGES).replace("seed: 17", "seed: 0x11", 1)
    path.write_text(text)
    with modify_lock(str(path), FS) as data:
        record(data, CHANGES["recorded anew"])
    assert text.split("  b@1:")[0] == path.read_text().split("  b@1:")[0]


def test_a_text_is_read_as_dvc_reads_it_and_a_reader_may_change_what_he_got() -> None:
    texts = {"params.yaml": dumps_yaml(PARAMS), "dvc.lock": lock_of(STAGES), "empty.yaml": ""}
    for name, text in texts.items():
        first = parse(text, name)
        assert first == parse_yaml(text, name)
        first.clear()
        assert parse(text, name) == parse_yaml(text, name)


def test_stages_with_equal_params_do_not_share_them() -> None:
    stages = parse(lock_of(STAGES), "dvc.lock")["stages"]
    stages["a"]["params"]["params.yaml"]["seed"] = 0
    assert stages["b@1"]["params"]["params.yaml"]["seed"] == 17


def test_what_is_no_yaml_is_named() -> None:
    for name in ("params.yaml", "dvc.lock"):
        with pytest.raises(YAMLFileCorruptedError, match=name):
            parse("schema: '2.0'\nstages:\n  a: [\n", name)
