"""A stage that says its hashes, DVC that records them, and who notices when they are wrong."""

import json
from typing import Any

import pytest

from pipelines.dvc_repo.cache_objects import listed_files, object_path
from pipelines.ledger.publish import recorded_outs

pytestmark = pytest.mark.slow

MODEL = "artifacts/policies/sft/model"
WRITES = '''
"""A large file of nothing, and what its writer says of it."""


def run(config, inputs, out, ctx):
    out["state"].mkdir()
    (out["state"] / "state.json").write_text("{}")
    out["model"].mkdir()
    path = out["model"] / "weights"
    with path.open("wb") as file:
        file.truncate(SIZE)
    ctx.wrote(path, MD5)
    return {"loss": 0.0}
'''
READS_NOTHING = '''
"""Would make something of it."""


def run(config, inputs, out, ctx):
    out["rollouts"].write_text("")
    return {}
'''


def repro(clone: Any, stage: str, *, fresh: bool) -> tuple[int, str]:
    """With DVC and the driver as fresh processes, or as forks of one that has imported DVC."""
    words = ("dvc", "repro", "--single-item", stage)
    if not fresh:
        done = clone.run(*words, check=False)
        return done.returncode, done.stdout
    process = clone.start(*words, LOCKSTEP_WARM="off")
    output, _ = process.communicate()
    return process.returncode, output


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh processes", "forked processes"])
def test_no_process_reads_a_file_whose_writer_hashed_it_and_a_wrong_hash_is_noticed(
    finished: Any, fresh: bool
) -> None:
    finished.without_tracking()
    wrong = "0123456789abcdef" * 2
    # So large that a fresh process imports DVC to tell it; no byte of it is on the disk.
    size = (1 << 28) + fresh
    write = WRITES.replace("SIZE", str(size)).replace("MD5", repr(wrong))
    finished.write_code("stages/sft.py", write)
    finished.write_code("stages/rollout.py", READS_NOTHING)
    status, output = repro(finished, "sft", fresh=fresh)
    assert status == 0, output
    folder = recorded_outs(finished.root)["sft"][MODEL]
    cache = finished.root / ".dvc/cache/files/md5"
    assert listed_files(object_path(cache, folder), folder) == {"weights": wrong}
    weights = finished.root / MODEL / "weights"
    assert weights.samefile(object_path(cache, wrong)), "DVC has made no copy"
    found = json.loads(finished.run("lockstep", "verify", "sft", "--json", check=False).stdout)
    assert {finding["path"] for finding in found["findings"]} >= {f"{MODEL}/weights"}
    # And before it becomes part of a result.
    status, output = repro(finished, "rollout@iter_001", fresh=fresh)
    assert status
    assert "is not what the stage was submitted for" in " ".join(output.split())
