"""Before a stage begins its nodes are checked; a bad one is named, and the job goes elsewhere.

Always true:
- Each rank checks its own node, one rank a node for what the node has once; then all ranks check
  the links between them. What each found is in a file before anybody acts on it.
- A job leaves a bad node by itself, with no driver: it has itself put back into the queue without
  that node. Where that is not allowed, it ends, and the driver submits a job without it.
- No more than `exclude_at_most` nodes are left out, and none twice: then the stage fails and names
  them all.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pipelines.base import atomic
from pipelines.base.redact import redact
from pipelines.ledger import files
from pipelines.ledger.entry import Attempt
from pipelines.ledger.launch import Launch
from pipelines.ledger.preflight import (
    BadNode,
    NodeReport,
    bad_nodes_of,
    each_once,
    exclude_flag,
    in_words,
    node_reports,
    num_reports,
    report_path,
)
from pipelines.ledger.reports import Result
from pipelines.ledger.state import State, TaskState
from pipelines.ledger.task import Task
from pipelines.slurm.script import REQUEUE_MARK
from pipelines.worker.blame import blame, late
from pipelines.worker.node_checks import check_node
from pipelines.worker.rendezvous import Gathering
from stages.context import RankLost, Stopped
from stages.engines.processes.node import node_name

POLL_S = 0.05
ASK_S = 0.5
"""Between two looks at files of other ranks: there may be hundreds that look."""
REPORTS_S = 20.0
"""How long a rank with a bad node waits for what the others say of theirs."""
LOOK_S = 4.0
"""How long a rank has to be silent to be taken for hanging."""

T = TypeVar("T")
_abandoned: list[threading.Thread] = []
_broken = threading.Event()
"""Whether a group of ranks has failed, and is left as it was."""


class BadNodes(Exception):
    """The stage should be somewhere else; nothing of it has begun."""

    def __init__(self, nodes: Sequence[BadNode]) -> None:
        self.nodes = tuple(nodes)
        super().__init__(f"bad node {in_words(self.nodes)}")


def hangs() -> bool:
    """Whether a check still hangs in here, or may, so that only os._exit ends this process."""
    return _broken.is_set() or any(thread.is_alive() for thread in _abandoned)


def check_own_node(attempt: Attempt, task: Task, others: Gathering) -> None:
    """BadNodes if this rank's node is one, with what other ranks have found by then."""
    launch = attempt.launched
    if not launch.resources.preflight.enabled or task.job is None:
        return
    entry = attempt.entry
    inputs = [launch.root / artifact.path for artifact in entry.spec.inputs.values()]
    bad = _check(attempt.folder, launch, task, [entry.folder / "spec.json", *inputs], others)
    if bad and task.world > 1:
        _wait_for_reports(attempt.folder, task, others)
        bad = bad_nodes_of(attempt.folder, task.restart)
    if bad:
        raise BadNodes(bad)


def check_node_of_session(folder: Path, launch: Launch, task: Task, others: Gathering) -> None:
    """The same for a session, which has no inputs yet."""
    if not launch.resources.preflight.enabled or task.job is None:
        return
    if bad := _check(folder, launch, task, [folder / "launch.json"], others):
        raise BadNodes(bad)


def _check(
    folder: Path, launch: Launch, task: Task, paths: list[Path], others: Gathering
) -> tuple[BadNode, ...]:
    floors, started = launch.resources.preflight, time.monotonic()
    wrong = [f"its disks or GPUs do not answer within {floors.seconds:g} s"]
    measured: dict[str, Any] = {}
    with suppress(TimeoutError):
        wrong, measured = _within(
            floors.seconds, lambda: check_node(folder, paths, launch.resources, task), others
        )
    bad = (BadNode(node_name(), redact("; ".join(wrong))),) if wrong else ()
    _report(folder, task, bad, measured, started)
    return bad


def check_links(attempt: Attempt, task: Task, others: Gathering, device: str) -> None:
    """Whether the ranks can exchange something, and how fast; all ranks come to the same end."""
    floors, started = attempt.launched.resources.preflight, time.monotonic()
    measured: dict[str, Any] = {}
    if not floors.enabled or others.heartbeats is None:
        return
    others.meet("preflight")
    from stages.selftest.links import measure_links

    heartbeats = others.heartbeats

    def at(phase: str) -> None:
        heartbeats.at = f"preflight, {phase}"

    try:
        links = _within(
            floors.seconds,
            # The backend's own time limit, which names nobody, only stands behind ours.
            lambda: measure_links(
                task.rank, task.world, node_name(), device, 2 * floors.seconds + 60, at
            ),
            others,
        )
    except TimeoutError:
        bad = _name_the_late(attempt, task, others, floors.seconds)
    except RuntimeError as error:
        _broken.set()
        if lost := heartbeats.find_lost():
            raise RankLost(lost) from error
        why = str(error).strip().splitlines() or [repr(error)]
        bad = (BadNode(node_name(), redact(f"it fails in collectives: {why[0]}")),)
    else:
        bad = each_once(blame(links, floors.collective, floors.clock_seconds))
        measured = links.as_json()
    finally:
        heartbeats.at = "the check of its inputs"
    if bad or task.leads:
        _report(attempt.folder, task, bad, measured, started, "links")
    if bad:
        raise BadNodes(bad)


def _name_the_late(
    attempt: Attempt, task: Task, others: Gathering, seconds: float
) -> tuple[BadNode, ...]:
    """Of collectives that do not end: whose ranks are silent, or have come least far."""
    assert others.heartbeats is not None
    before = others.heartbeats.heartbeats_of(range(task.world))
    time.sleep(LOOK_S)
    if left := others.heartbeats.left():
        raise RankLost(str(left["error"]))
    now = others.heartbeats.heartbeats_of(range(task.world))
    nodes = {report.rank: report.node for report in node_reports(attempt.folder, task.restart)}
    if bad := late(before, now, nodes, seconds):
        return bad
    raise RankLost(
        f"collectives did not end within {seconds:g} s (`preflight.seconds`), and all "
        f"{task.world} ranks were as far: look at the network between their nodes, and at "
        "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME in `setup`"
    )


def go_elsewhere(attempt: Attempt, task: Task, error: BadNodes) -> Result:
    """What becomes of a job whose nodes are bad."""
    launch, known = attempt.launched, attempt.bad_nodes
    most = launch.resources.preflight.exclude_at_most
    # Of the shards of an array each has been told what it knew then, ranks all of it.
    label = "*" if task.world > 1 else task.label
    earlier = [bad_nodes_of(attempt.folder, start, label) for start in range(task.restart)]
    told = {bad.node for nodes in (launch.excluded, *earlier) for bad in nodes}
    back = told.intersection(bad.node for bad in error.nodes)
    what = ""
    if back:
        nodes = ", ".join(sorted(back))
        what = f"the job is back on {nodes}, which it was to leave out: is there no other node?"
    elif len(known) > most:
        what = f"{len(known)} bad nodes, and `preflight.exclude_at_most` is {most}"
    if what:
        names = ",".join(bad.node for bad in known)
        return Result(
            state=State.FAILED,
            error=(
                f"{what}. Bad: {in_words(known)}. Have them looked at, put {names} into `exclude`, "
                "or change the floors in `preflight` of the profile; then run the same command: "
                "progress is saved"
            ),
        )
    if launch.restarts_before + task.restart < launch.resources.requeues:
        exclude = exclude_flag(launch.resources.exclude, known)
        mark = attempt.folder / f"{REQUEUE_MARK}{task.job}.{task.restart}"
        atomic.write_text(mark, f"{exclude}\n")
    return Result(state=TaskState.BAD_NODE, error=str(error))


def _report(
    folder: Path,
    task: Task,
    bad: tuple[BadNode, ...],
    measured: dict[str, Any],
    started: float,
    what: str = "node",
) -> None:
    report = NodeReport(
        rank=task.rank,
        node=node_name(),
        bad=bad,
        measured=measured,
        seconds=time.monotonic() - started,
        time=time.time(),
    )
    files.write(report_path(folder, task.restart, task.label, what, bad=bool(bad)), report)
    outcome = f"bad: {in_words(bad)}" if bad else "nothing wrong"
    print(f"preflight, {what}: {outcome} ({report.seconds:.1f} s)", flush=True)


def _wait_for_reports(folder: Path, task: Task, others: Gathering) -> None:
    """All bad nodes at once cost one restart; one after another, a restart each."""
    deadline = time.monotonic() + REPORTS_S
    while num_reports(folder, task.restart) < task.world and time.monotonic() < deadline:
        if others.should_stop():
            return
        time.sleep(ASK_S)


def _within(seconds: float, do: Callable[[], T], others: Gathering) -> T:
    """Its result; TimeoutError if it hangs, though not for time in which all this is halted."""
    ended: list[T | BaseException] = []

    def run() -> None:
        try:
            ended.append(do())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, name="preflight", daemon=True)
    _abandoned.append(thread)
    thread.start()
    passed, last = 0.0, time.monotonic()
    looked = last
    while thread.is_alive():
        thread.join(POLL_S)
        passed, last = passed + min(time.monotonic() - last, 1.0), time.monotonic()
        if others.heartbeats and last - looked > ASK_S:
            looked = last
            if left := others.heartbeats.left():
                raise (Stopped if left["stopped"] else RankLost)(str(left["error"]))
        if others.should_stop():
            raise Stopped("before the stage began")
        if passed > seconds and thread.is_alive():
            raise TimeoutError
    result = ended[0]
    if isinstance(result, BaseException):
        raise result
    return result
