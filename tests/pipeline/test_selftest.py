"""`lockstep selftest` on this machine, without Slurm: one process that is everything."""

import json
from typing import Any


def test_this_machine_proves_itself(clone: Any) -> None:
    clone.without_tracking()
    said = clone.run("lockstep", "selftest").stdout
    report = json.loads((clone.root / ".lockstep/selftest/001/report.json").read_text())
    assert {finding["verdict"] for finding in report["findings"]} <= {"ok", "slow"}, said
    measured = {check: ranks[0]["values"] for check, ranks in report["measured"].items()}
    assert measured["killed"]["exit_status"] == -9
    assert measured["resumed"]["resumed_from"] == 3
    digests = {measured[check]["digest"] for check in ("alone", "together", "resumed")}
    assert len(digests) == 1, "one rank is one process, and goes on to the same bytes"
    assert "exit status 0" in said
    assert not clone.processes()
