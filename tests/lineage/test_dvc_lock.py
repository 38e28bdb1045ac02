"""dvc.lock in the form that DVC gives it, and in any other."""

import io

import pytest
from ruamel.yaml import YAML

from pipelines.lineage.dvc_lock import LockReader

LOCK = """\
schema: '2.0'
stages:
  prepare:
    cmd: python -m pipelines stage prepare
    deps:
    - path: data
      hash: md5
      md5: 6ffbaaad7b4ac6e1afabed19a80b2560.dir
      size: 0
      nfiles: 1
    - path: code/prepare.json
      hash: md5
      md5: '00000000000000000000000000000012'
      size: 5
    params:
      params.yaml:
        prepare:
          digits: 2
          accuracy: 1e-05
        seed: 17
    outs:
    - path: artifacts/data/prompts.parquet
      hash: md5
      md5: 539b71fdb86fa520460b6cb8e8261d90
      size: 77
  rollout@iter_001:
    cmd: python -m pipelines stage rollout@iter_001
    outs:
    - path: artifacts/rollouts/iter_001.parquet
      hash: md5
      md5: 78fd6ef947baaa890feccbe4b90f5580
      size: 1
"""


def test_the_fast_way_and_the_parser_agree() -> None:
    records = LockReader().read(LOCK)
    assert records["prepare"]["params"] == {
        "prepare.digits": 2,
        "prepare.accuracy": 1e-05,
        "seed": 17,
    }
    assert records["prepare"]["inputs"] == {"data": "6ffbaaad7b4ac6e1afabed19a80b2560.dir"}
    assert records["prepare"]["code"] == {"code/prepare.json": "00000000000000000000000000000012"}
    text = io.StringIO()
    yaml = YAML()
    yaml.indent(mapping=4, sequence=6, offset=3)  # a form that the fast way does not know
    yaml.dump(yaml.load(LOCK), text)
    assert "\n    prepare:" in text.getvalue()
    assert LockReader().read(text.getvalue()) == records


@pytest.mark.parametrize("path", ["'data: odd'", '"a \\" b"', "- x", "über/weg", "a # b"])
def test_odd_paths_are_read_as_yaml_reads_them(path: str) -> None:
    text = LOCK.replace("path: data\n", f"path: {path}\n")
    try:
        expected = YAML(typ="safe").load(text)["stages"]["prepare"]["deps"][0]["path"]
    except Exception:
        with pytest.raises(ValueError, match="YAML"):
            LockReader().read(text)
        return
    assert next(iter(LockReader().read(text)["prepare"]["inputs"])) == expected


def test_equal_blocks_of_two_commits_are_one_record() -> None:
    reader = LockReader()
    one, other = reader.read(LOCK), reader.read(LOCK.replace("78fd6ef9", "88fd6ef9"))
    assert one["prepare"] is other["prepare"]
    assert one["rollout@iter_001"] != other["rollout@iter_001"]


@pytest.mark.parametrize(
    "text", ["stages: [", "stages:\n  sft: 3\n", "stages:\n  sft:\n    deps: x\n"]
)
def test_what_is_no_lock_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        LockReader().read(text)


@pytest.mark.parametrize("text", ["", "schema: '2.0'\n", "schema: '2.0'\nstages:\n", "3\n"])
def test_an_empty_lock_has_no_stages(text: str) -> None:
    assert LockReader().read(text) == {}
