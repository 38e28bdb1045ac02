"""What a job of a chain finds, and does, after a kill or a refusal between two of its steps.

Fake commands of Slurm answer: a real one cannot be stopped between two lines of ours, nor made to
refuse at will. What real jobs do is in tests/slurm/test_successors.py.
"""

from pathlib import Path
from typing import Any

import pytest

from pipelines.config.profiles import Resources
from pipelines.ledger import files
from pipelines.ledger.entry import Attempt
from pipelines.ledger.preflight import BadNode, NodeReport, report_path
from pipelines.ledger.scheduler_view import SchedulerView, SlurmJob
from pipelines.ledger.state import TaskState
from pipelines.ledger.successor import Successor
from pipelines.slurm.link import Link, LinkOrder
from pipelines.slurm.script import LINK_ELSEWHERE, LINK_OVER
from pipelines.slurm.successor import begin, end
from tests.control.test_scheduler import FakeSlurm
from tests.ledger_values import ORIGIN, SLURM, launch, task_report

TAKES = """#!/bin/sh
said=$(sed -nE 's/^#SBATCH --(exclude|dependency)/\\1/p' $2)
echo sbatch $said >> {folder}/calls
expr 20 + $(grep -c sbatch {folder}/calls)
"""
UPDATES = '#!/bin/sh\n[ "$1" = update ] || exit 1\necho "scontrol $*" >> {folder}/calls\n{then}\n'
BAD = BadNode("two", "it is broken")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path)
    monkeypatch.setenv("PATH", f"{fake.folder / 'bin'}:/usr/bin:/bin")
    fake.answers("sbatch", TAKES.format(folder=fake.folder))
    return fake


def link(slurm: FakeSlurm, name: str, state: str = "", **order: Any) -> Link:
    """A link whose job, if it has one, is in a state of Slurm's."""
    made = Link(slurm.repository.home / "chains/1/links" / name)
    jobs = (str(7 + made.number),) if state else ()
    made.attempt.folder.mkdir(parents=True)
    resources = Resources(requeues=3, requeue=False, exclude="old")
    made.attempt.write(launch(SLURM, resources=resources, jobs=jobs))
    chosen = LinkOrder(made.stage, slurm.repository.root, ORIGIN, **order)
    files.write(made.folder / "link.json", chosen)
    if jobs:
        seen = {jobs[0]: SlurmJob(jobs[0], state)}
        made.attempt.write(SchedulerView(jobs=seen, ended=seen[jobs[0]].ended))
    return made


def name_successor(of: Link, successor: Link) -> None:
    files.write(of.folder / "successor.json", Successor(successor.folder))


def find_bad_node(attempt: Attempt) -> None:
    report = NodeReport(rank=0, node=BAD.node, bad=(BAD,), seconds=0.1, time=1.0)
    files.write(report_path(attempt.folder, 0, "00000", "node", bad=True), report)
    ended = task_report(TaskState.BAD_NODE, error="bad node two", job=attempt.jobs[0])
    files.write(attempt.folder / "tasks/00000.json", ended)


def calls(slurm: FakeSlurm, command: str) -> list[str]:
    lines = (slurm.folder / "calls").read_text().splitlines()
    return [line for line in lines if line.startswith(command)]


def test_who_was_killed_before_its_place_was_in_the_queue_takes_another(slurm: FakeSlurm) -> None:
    """Slurm has started it again, and nobody else would compute its stage."""
    link(slurm, "sft", "RUNNING")
    waits = link(slurm, "rollout@1", "RUNNING", upstream=("sft",))
    name_successor(waits, link(slurm, "rollout@1~2", upstream=("sft",)))
    assert begin(waits.folder) == LINK_ELSEWHERE
    assert calls(slurm, "sbatch") == ["sbatch dependency=afterany:8 exclude=old"]
    again = waits.attempt.successor
    assert again
    assert (again.folder.name, again.jobs) == ("rollout@1~3", ["21"])


def test_who_needs_a_stage_that_was_killed_before_its_successor_was_there_queues_it(
    slurm: FakeSlurm,
) -> None:
    killed = link(slurm, "sft", "PREEMPTED")
    waits = link(slurm, "rollout@1", "RUNNING", upstream=("sft",))
    assert begin(waits.folder) == LINK_ELSEWHERE
    first, second = calls(slurm, "sbatch")
    assert "dependency" not in first
    assert "dependency=afterany:21 " in second
    goes_on = killed.attempt.successor
    assert goes_on
    assert goes_on.launched.restarts_before == 1


def test_who_cannot_wait_again_gives_its_stage_up_and_says_why(slurm: FakeSlurm) -> None:
    slurm.answers("sbatch", "#!/bin/sh\necho 'error: Invalid account' >&2\nexit 1\n")
    link(slurm, "sft", "RUNNING")
    waits = link(slurm, "rollout@1", "RUNNING", upstream=("sft",))
    assert begin(waits.folder) == LINK_OVER
    ended = waits.attempt.result
    assert ended
    assert ended.error
    assert "Invalid account" in ended.error


@pytest.mark.parametrize("restarted", [True, False])
def test_a_successor_is_told_of_a_bad_node(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """By a job that Slurm has put back without that node, and by one that ends."""
    slurm.answers("scontrol", UPDATES.format(folder=slurm.folder, then=""))
    first = link(slurm, "sft", "RUNNING")
    second = link(slurm, "sft~2", "PENDING", predecessor="sft")
    name_successor(first, second)
    find_bad_node(first.attempt)
    monkeypatch.setenv("SLURM_JOB_ID", first.attempt.jobs[0])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert (begin if restarted else end)(first.folder) == 0
    assert calls(slurm, "scontrol") == ["scontrol update JobId=9 ExcNodeList=old,two"]
    assert second.attempt.launched.excluded == (BAD,)


def test_a_successor_of_which_slurm_was_not_told_may_meet_a_bad_node(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not count as one that it was to leave out; the next one is submitted without it."""
    slurm.answers("scontrol", UPDATES.format(folder=slurm.folder, then="exit 1"))
    first = link(slurm, "sft", "FAILED")
    second = link(slurm, "sft~2", "RUNNING", predecessor="sft")
    name_successor(first, second)
    find_bad_node(first.attempt)
    monkeypatch.setenv("SLURM_JOB_ID", second.attempt.jobs[0])
    assert end(first.folder) == 0
    assert begin(second.folder) == 0
    assert second.attempt.launched.excluded == ()
    assert calls(slurm, "sbatch") == ["sbatch dependency=afternotok:9 exclude=old,two"]
