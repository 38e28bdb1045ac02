"""What is lost of a job that Slurm kills and starts again, without any accounting of Slurm's."""

import json
from typing import Any

import pytest

from pipelines.ledger.entry import Attempt
from pipelines.ledger.usage import usages_of
from tests.slurm.conftest import RunOnSlurm
from tests.waiting import succeeded


def test_what_a_killed_start_computed_is_told_as_lost(medium_sft: Any) -> None:
    """It does not listen, so it has saved nothing when it is killed."""
    medium_sft.set_profile(checkpoint_seconds=600, cpus_per_task=2)
    code = (medium_sft.root / "stages/sft.py").read_text()
    deaf = code.replace("if stop:", "if False:").replace(" and not ctx.should_stop()", "")
    medium_sft.write_code("stages/sft.py", deaf)
    driver, row = medium_sft.start_driver(), medium_sft.training()
    before = medium_sft.attempt()
    medium_sft.until(lambda: any(u.seconds > 1 for u in usages_of(before)), "a second reading")
    medium_sft.cluster.run("scontrol", "requeue", row["job"])
    medium_sft.until(lambda: medium_sft.status()["restarts"] == 1, "a restart")
    medium_sft.release()
    succeeded(driver)

    first, second = usages_of(medium_sft.attempt())
    assert (first.state, second.state) == (None, "completed")
    assert first.seconds > 1
    cost = json.loads(medium_sft.run("lockstep", "cost", "--stage", "sft", "--json").stdout)
    (line,) = cost["lines"]
    lost = {name: amount["hours"] * 3600 for name, amount in line["reasons"].items()}
    assert set(lost) == {"requeued", "starting again"}
    assert lost["requeued"] == pytest.approx(first.seconds, abs=0.01)
    # Python had to start before it could note anything; Slurm counts in whole seconds.
    assert lost["starting again"] > second.start_up - 0.01
    computed = line["computed"]["hours"] * 3600
    assert computed == pytest.approx(second.seconds - second.start_up, abs=0.01)
    assert line["held"]["cpu_hours"] == pytest.approx(2 * line["held"]["hours"])
    assert line["waited_again"]["hours"] > 0
    assert (line["attempts"], line["estimated"]) == (1, 0)


def test_shards_and_nodes_count_each_and_so_does_a_session(pipeline_on_slurm: RunOnSlurm) -> None:
    clone = pipeline_on_slurm.clone
    bill = json.loads(clone.run("lockstep", "cost", "--json").stdout)
    lines = {line["name"]: line for line in bill["lines"]}
    (session,) = (line for name, line in lines.items() if name.startswith("session "))
    assert bill["total"]["estimated"] == 0
    assert bill["total"]["lost"] == session["lost"], "nothing but what it was idle"
    assert set(session["reasons"]) == {"idle session"}
    assert set(lines) >= {"sft", "policy_update"}, "what it served is no part of that"

    ran = [usages_of(each) for each in attempts(clone, "rollout@*")]
    shards = {usage.job for usages in ran for usage in usages}
    assert len(shards) == 2 * len(ran)
    held = lines["rollout"]["held"]["hours"] * 3600
    assert held > sum(usage.seconds for usages in ran for usage in usages) - 0.01

    (attempt,) = attempts(clone, "evaluate_sft")
    ranks = usages_of(attempt)
    held = lines["evaluate_sft"]["held"]["hours"] * 3600
    assert held < sum(usage.seconds for usage in ranks), "ranks share the time of their job"
    cores = 2 * attempt.launched.resources.cpus_per_task
    cpu_hours = lines["evaluate_sft"]["held"]["cpu_hours"]
    assert cpu_hours * 3600 == pytest.approx(cores * held), "on two nodes"


def attempts(clone: Any, stage: str) -> list[Attempt]:
    return [Attempt(path) for path in clone.root.glob(f".lockstep/jobs/{stage}/*/attempts/001")]
