"""The record of tools in a pipeline: an artifact like any other, and the input of a later run."""

from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.test_session import executors
from tests.remote_tools import REMOTE, Server, by_turn

pytestmark = pytest.mark.slow
STAGE = "rollout@iter_001"


def test_a_rerun_needs_the_record_and_no_server(finished: Any) -> None:
    """Also in a session, which has the bytes of a process of its own."""
    clone = finished
    clone.without_tracking()
    server = Server(by_turn())
    (clone.root / "environments/remote.py").write_text(REMOTE)
    (clone.root / "url").write_text(server.url)
    clone.set_params(
        rollout__environment="remote:Remote",
        rollout__max_turns=3,
        rollout__max_new_tokens=12,
        rollout__max_observation_tokens=8,
        rewards={"paid": {"kind": "environment"}},
    )
    clone.run("dvc", "repro", STAGE)
    artifacts: Path = clone.root / "artifacts"
    paths = [artifacts / f"{name}/iter_001.parquet" for name in ("rollouts", "tool_answers")]
    before = [path.read_bytes() for path in paths]
    assert len(server.asked) > 16, "each begins, and somebody acts"
    num_asked = len(server.asked)
    server.stop()

    clone.set_params(rollout__tools="replay")
    refused = clone.run("dvc", "repro", STAGE, check=False)
    assert refused.returncode
    assert "there is no record (*.parquet) in" in refused.stdout
    (clone.root / "tool_answers/iter_001.parquet").write_bytes(before[1])
    clone.run("lockstep", "session", "up", "--stages", "rollout")
    clone.run("dvc", "repro", STAGE)
    clone.run("lockstep", "session", "down")
    assert executors(clone, STAGE) == ["session"]
    assert [path.read_bytes() for path in paths] == before
    assert len(server.asked) == num_asked

    said = clone.run("lockstep", "lineage", "rollouts@iter_001").stdout
    record = next(line for line in said.splitlines() if "tool_answers" in line)
    assert "rollouts" in record
    assert "tool_answers (given)" in said
    shown = clone.run("lockstep", "lineage", "tool_answers@iter_001").stdout
    assert f"made by {STAGE}" in shown

    clone.set_params(rollout__tool_record="artifacts/tool_answers")
    refused = clone.run("lockstep", "plan", check=False)
    assert "which this pipeline computes: copy it to a separate folder" in refused.stdout
