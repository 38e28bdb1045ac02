"""`lockstep samples REV:POLICY`: answers of a policy that the workspace no longer has."""

import json
import shutil
from typing import Any


def test_answers_of_another_commit_come_out_of_the_cache(finished: Any) -> None:
    finished.without_tracking()
    finished.run("git", "tag", "first")
    words = ("lockstep", "samples", "-n", "0", "--json")
    now = json.loads(finished.run(*words, "iter_001").stdout)
    beside = json.loads(finished.run(*words, "iter_001", "--against", "first:sft").stdout)
    assert beside["samples"] == now["samples"]

    shutil.rmtree(finished.root / "artifacts/evaluations/iter_001")
    before = json.loads(finished.run(*words, "first:iter_001").stdout)
    assert (before["policy"], before["against"]) == ("first:iter_001", "first:sft")
    assert before["samples"] == now["samples"]

    unknown = finished.run("lockstep", "samples", "nowhere:iter_001", check=False)
    assert unknown.returncode == 2
    assert "git knows no revision or DVC experiment 'nowhere'" in unknown.stdout
    missing = finished.run("lockstep", "samples", "first:iter_009", check=False)
    assert missing.returncode == 2
    assert "no such policy was evaluated there; there are iter_001, sft" in missing.stdout
