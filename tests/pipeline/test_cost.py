"""What a pipeline took that ran on this machine, as `lockstep cost` and `lockstep status` tell."""

import json
from pathlib import Path

from pipelines.ledger.entry import Ledger
from tests.conftest import Clone


def test_every_stage_that_ran_here_has_a_cost_and_so_has_the_session_that_ran_some(
    finished_root: Path,
) -> None:
    clone = Clone(finished_root)
    bill = json.loads(clone.run("lockstep", "cost", "--by", "attempt", "--json").stdout)
    idle = [line for line in bill["lines"] if line["name"].startswith("session ")]
    stages = [line for line in bill["lines"] if line not in idle]
    assert len(stages) == len(Ledger(clone.root / ".lockstep/jobs").entries())
    assert {(line["attempts"], line["estimated"]) for line in stages} == {(1, 0)}
    assert all(0 < line["held"]["hours"] < 1 for line in stages)
    assert all(line["computed"] == line["held"] for line in stages), "nothing went wrong"
    assert all(line["peak"]["memory_bytes"] > 20 << 20 for line in stages)
    assert [list(line["reasons"]) for line in idle] == [["idle session"]]
    assert bill["total"]["held"]["gpu_hours"] == 0

    (sft,) = (line for line in stages if line["name"].startswith("sft "))
    attempt = next(clone.root.glob(".lockstep/jobs/sft/*/attempts/001"))
    result = json.loads((attempt / "result.json").read_text())
    worked = result["ended"] - result["started"]
    assert sft["held"]["hours"] * 3600 >= worked - 0.1, "all that the stage worked is in it"
    rows = json.loads(clone.run("lockstep", "status", "--json").stdout)["stages"]
    (row,) = (row for row in rows if row["stage"] == "sft")
    assert row["cost"]["held"] == sft["held"]
    assert "GPU" not in clone.run("lockstep", "cost").stdout, "on CPUs, CPU-hours are what counts"
