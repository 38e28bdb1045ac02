"""The job's side: run one attempt at a stage, from its folder alone.

The outputs are written aside and renamed as a whole at the end. Whatever happens, `result.json`
says how it ended; where even that is missing, the worker died. A job may have many processes, each
with a report of its own in `tasks/`; the one that writes the outputs reports for all.

On Slurm, a stage that is told to stop before it is done saves its scratch and leaves a mark, on
which the batch script puts the job back into the queue.
"""

import argparse
import errno
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.console import say_anything
from pipelines.base.imports import uncollected
from pipelines.base.locks import hold_lock
from pipelines.base.redact import RedactedStream, redact
from pipelines.base.redacted_log import redacted_log
from pipelines.config.profiles import (
    ExecutorKind,
    num_samplers,
    processes_of,
    tensor_parallel_of,
)
from pipelines.identity import environment
from pipelines.identity.hashing import HashCache
from pipelines.identity.spec import Spec
from pipelines.ledger import files, out_hashes
from pipelines.ledger.entry import FAILURE_PREFIX, METRICS_OUT, Attempt, Entry
from pipelines.ledger.environments import note_environment
from pipelines.ledger.launch import Launch
from pipelines.ledger.preflight import bad_nodes_of
from pipelines.ledger.reports import Result, TaskReport, Worker
from pipelines.ledger.state import State, TaskState
from pipelines.ledger.task import Task, find_task
from pipelines.slurm import link
from pipelines.slurm.restarts import refuse_endless_restarts, stop_or_requeue
from pipelines.slurm.script import BAD_NODE_STATUS
from pipelines.slurm.signals import SlurmWarning
from pipelines.worker import preflight
from pipelines.worker.inputs import check_inputs
from pipelines.worker.meter import Meter, metered
from pipelines.worker.rendezvous import among_ranks
from pipelines.worker.stage_in import Staging, staging
from stages.context import Context, RankLost, ShareDone, StageError, Stopped
from stages.contracts.base import Processes
from stages.contracts.catalog import STAGES
from stages.contracts.sharding import Sharding
from stages.engines.models import resident
from stages.engines.processes import determinism, heap

StageFunction = Callable[..., dict[str, float]]
_PASSING = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EBUSY)
"""Errors of the system that another try may not meet; a full disk or a missing file stays."""


CODE = Path(__file__).resolve().parents[2]
"""Where this process has its code from."""


def run_attempt(folder: str, first_shard: int = 0, warning: SlurmWarning | None = None) -> str:
    """Run this process's part of the attempt in `folder`; returns how it ended."""
    say_anything()
    warning = warning or SlurmWarning()
    attempt = Attempt(Path(folder))
    stage = STAGES[attempt.entry.spec.name]
    launch = attempt.launched
    # Slurm's variables also stand around a job of another kind, started inside an allocation.
    on_slurm = launch.executor is ExecutorKind.SLURM
    processes = processes_of(stage, launch.resources)
    task = find_task(processes, launch.num_shards, first_shard) if on_slurm else Task()
    if task.idle:
        return TaskState.DONE
    # How a job without Slurm shows that it lives; of others, Slurm tells.
    lives = hold_lock(attempt.folder / "alive", wait=True) if task.job is None else nullcontext()
    with (
        lives,
        # A driver that was killed at the wrong moment may have led to two attempts at once.
        hold_lock(attempt.entry.folder / f"working.{task.label}", wait=True),
        metered(attempt, task, launch) as meter,
    ):
        # Slurm may bring back a job that is done, after a node's failure say: its result stands.
        done = attempt.entry.out.exists() or attempt.entry.record is not None
        _report_start(attempt, task, done)
        if done:
            result = Result(state=State.COMPLETED)
        elif attempt.was_cancelled:
            # Slurm has brought back a job that nobody wants any more.
            result = Result(state=State.CANCELLED, error="cancelled before it began")
        else:
            with _redacted(launch):
                result = _run(attempt, launch, task, warning, meter)
        # First: whoever hears of the end asks at once what it took.
        meter.end(result.state)
        _report_end(attempt, task, result, keep=done)
    return str(result.state)


@contextmanager
def _redacted(launch: Launch) -> Iterator[None]:
    """A debugged stage has no log: a debugger needs the terminal as it is."""
    if launch.executor is not ExecutorKind.DEBUG:
        with redacted_log():
            yield
        return
    with (
        redirect_stdout(RedactedStream(sys.stdout)),  # type: ignore[type-var]
        redirect_stderr(RedactedStream(sys.stderr)),  # type: ignore[type-var]
    ):
        yield


def _report_start(attempt: Attempt, task: Task, done: bool) -> None:
    if task.job is not None:
        _report(attempt, task, TaskState.RUNNING)
    if done:
        return
    if task.job is not None and task.restart and task.leads:
        # The result of an earlier start of the same job no longer holds.
        (attempt.folder / "result.json").unlink(missing_ok=True)
    if task.leads and not (task.num_shards > 1 and attempt.worker):
        # How far an earlier start of the job was is not how far this one is.
        (attempt.entry.folder / "progress.json").unlink(missing_ok=True)
        me = Worker(
            pid=os.getpid(), host=socket.gethostname(), time=time.time(), restart=task.restart
        )
        attempt.write(me)


def _add_environment(attempt: Attempt, made_by: dict[str, Any]) -> None:
    """Kept from the start: whoever finds outputs without a result still knows what made them."""
    worker = attempt.worker
    if worker and (worker.pid, worker.host) == (os.getpid(), socket.gethostname()):
        attempt.write(replace(worker, environment=made_by))


def _report_end(attempt: Attempt, task: Task, result: Result, *, keep: bool) -> None:
    """With `keep`, a result that is there already stays: it says more than this process knows."""
    if task.job is not None:
        _report(attempt, task, result.state, result.error)
    final = result.state in (State.COMPLETED, State.CANCELLED, State.FAILED)
    shares = task.num_shards > 1 and result.state != State.COMPLETED
    if final and task.leads and not shares and not (keep and attempt.result):
        attempt.write(result)


def _report(
    attempt: Attempt, task: Task, state: State | TaskState, error: str | None = None
) -> None:
    """Leave what this process has to say of itself."""
    report = TaskReport(
        rank=task.rank,
        shard=task.shard,
        num_shards=task.num_shards,
        job=task.job,
        host=socket.gethostname(),
        pid=os.getpid(),
        restart=task.restart,
        log=task.log,
        what=task.what(),
        state=state,
        error=error,
        time=time.time(),
    )
    files.write(attempt.folder / "tasks" / f"{task.label}.json", report)
    alarm = attempt.folder / "tasks" / f"{FAILURE_PREFIX}{task.label}"
    if state == State.FAILED:
        alarm.touch()
    else:
        alarm.unlink(missing_ok=True)


def _run(
    attempt: Attempt, launch: Launch, task: Task, warning: SlurmWarning, meter: Meter
) -> Result:
    spec = attempt.entry.spec
    context = _context(attempt, spec, launch, task)
    with staging(spec, launch, task, context) as on_node:
        result = _run_with(on_node, attempt, warning, meter)
        on_node.end(completed=result.state in (State.COMPLETED, TaskState.DONE))
        return replace(result, error=result.error and on_node.in_users_words(result.error))


def _run_with(on_node: Staging, attempt: Attempt, warning: SlurmWarning, meter: Meter) -> Result:
    started = time.time()
    spec, launch, task, context = on_node.spec, on_node.launch, on_node.task, on_node.context
    warning.answer(context.request_stop)
    again = f", restart {task.restart}" if task.restart else ""
    who = " ".join(filter(None, [task.what(), f"on {socket.gethostname()}"]))
    print(f"{spec.stage}: attempt {attempt.number}{again}, {who}", flush=True)
    made_by: dict[str, Any] = {}
    deterministic = launch.resources.deterministic
    heap.keep_freed_memory()
    try:
        _check_code(launch)
        made_by = environment.describe(context, deterministic)
        _add_environment(attempt, made_by)
        refuse_endless_restarts(launch, task)
        with _on_terminate(_stop_at_once, task, warning), among_ranks(task, context) as others:
            preflight.check_own_node(attempt, task, others)
            if deterministic:
                determinism.before_import()
            with uncollected():
                run = importlib.import_module(STAGES[spec.name].module).run
            if deterministic:
                determinism.after_import()
            made_by = environment.describe(context, deterministic)
            _add_environment(attempt, made_by)
            if task.leads:
                note_environment(attempt, task, made_by)
            preflight.check_links(attempt, task, others, context.device)
            if task.reads_for_its_node:
                on_node.bring()
                check_inputs(spec, launch.root, context.should_stop, on_node.left)
            others.meet()
            on_node.agree()
        hashes = {path: spec.inputs[name].hash for name, path in on_node.inputs.items()}
        with _on_terminate(context.request_stop, task, warning), resident.among(hashes):
            meter.stage_begins()
            outs, metrics = _compute(run, attempt, context, on_node.inputs, task.label)
        result = Result(state=State.COMPLETED, outs=outs, metrics=metrics)
    except ShareDone:
        result = Result(state=TaskState.DONE)
    except preflight.BadNodes as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        result = preflight.go_elsewhere(attempt, task, error)
    except (Stopped, KeyboardInterrupt):
        if task.world > 1 and bad_nodes_of(attempt.folder, task.restart):
            # Slurm ends this rank because of another one, which has seen to what comes next.
            result = Result(state=TaskState.LOST_A_RANK, error="a node of another rank is bad")
        else:
            result = stop_or_requeue(attempt, task)
    except RankLost as error:
        # The rank that is gone, or its node, is what failed; Slurm knows how and what comes next.
        print(f"error: {error}", file=sys.stderr, flush=True)
        result = Result(state=TaskState.LOST_A_RANK, error=redact(str(error)))
    except StageError as error:
        print(f"error: {on_node.in_users_words(str(error))}", file=sys.stderr, flush=True)
        result = Result(state=State.FAILED, error=redact(str(error)))
    except Exception as error:
        traceback.print_exc()
        if context.should_stop():
            # What was told to stop with the worker, a helper process, may go first.
            result = stop_or_requeue(attempt, task)
        else:
            result = Result(
                state=State.FAILED,
                error=redact(_in_words(error, attempt.entry)),
                retryable=_may_pass(error, attempt),
            )
    return replace(result, started=started, ended=time.time(), environment=made_by)


def _check_code(launch: Launch) -> None:
    """Whether this process runs the copy of the code that its result will be recorded for."""
    # A debugged stage runs in the command's own process, and with the command's own code.
    if launch.executor is not ExecutorKind.DEBUG and launch.code.resolve() != CODE:
        raise StageError(
            f"this job has its code from {CODE}, not from {launch.code}, the copy made for it: "
            "something resets PYTHONPATH on the way to the worker; see `setup`, `python`, "
            "`container` and `extra` in the profile"
        )


def _may_pass(error: Exception, attempt: Attempt) -> bool:
    """Whether another try may do better; in a session, also one without what it keeps in memory."""
    if attempt.session is not None and type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, OSError) and error.errno in _PASSING


def _in_words(error: Exception, entry: Entry) -> str:
    """The error, and where, if it does not say so itself: a failing write names no file."""
    text = f"{type(error).__name__}: {error}"
    nameless = isinstance(error, OSError) and error.filename is None
    return f"{text}, at work in {entry.folder}" if nameless else text


def _context(attempt: Attempt, spec: Spec, launch: Launch, task: Task) -> Context:
    resources = launch.resources
    stage = STAGES[spec.name]
    together = processes_of(stage, resources) is Processes.TOGETHER
    learns_together = stage.processes is Processes.TOGETHER and not stage.reads
    samplers = num_samplers(stage, resources) if task.world > 1 else 0
    heartbeats = attempt.folder / "restarts" / f"{task.restart:03}"
    if task.world > 1:
        heartbeats.mkdir(parents=True, exist_ok=True)
    return Context(
        stage=spec.stage,
        key=spec.key,
        seed=spec.config.get("seed", 0),
        folder=attempt.entry.folder,
        device=task.device(resources),
        rank=task.rank,
        world=task.world - samplers,
        samplers=samplers,
        collective_seconds=resources.collective_seconds,
        heartbeats=heartbeats if task.world > 1 else None,
        shard=task.shard,
        num_shards=task.num_shards,
        micro_tokens=resources.micro_tokens,
        compile=resources.compile,
        checkpoint_activations=resources.checkpoint_activations,
        sharding=resources.sharding if together else Sharding.NONE,
        offload=resources.offload,
        tensor_parallel=tensor_parallel_of(stage, resources),
        generator_memory=resources.generator_memory,
        sequence_parallel=resources.sequence_parallel if learns_together else 1,
        checkpoint_seconds=resources.checkpoint_seconds,
        graph=atomic.read_json(attempt.folder / "graph.json") or launch.graph,
    )


def _compute(
    run: StageFunction,
    attempt: Attempt,
    context: Context,
    inputs: Mapping[str, Path],
    label: str,
) -> tuple[dict[str, str], dict[str, float]]:
    """Run the stage's function into a folder aside, then make that folder `out` in one step.

    Returns the hashes of the outputs by path, and the summary metrics.
    """
    entry, spec = attempt.entry, attempt.entry.spec
    config = STAGES[spec.name].config.from_values(spec.config, spec.key)
    for left in entry.folder.glob(f"out.{label}.*"):
        atomic.remove(left)  # by a process that was killed
    aside = entry.folder / f"out.{label}.{atomic.here()}.{os.getpid()}"
    aside.mkdir()
    out = {name: aside / name for name in spec.outs}
    try:
        metrics = run(config, dict(inputs), out, context)
    except BaseException:
        # On a full disk, this also makes room to say so.
        atomic.remove(aside)
        raise
    for name, path in out.items():
        if not path.exists():
            raise AssertionError(f"{spec.stage} returned without writing its output {name!r}")
    (aside / METRICS_OUT).write_text(
        json.dumps(metrics, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
    atomic.sync_tree(aside)
    hashes = HashCache()
    hashes.believe(context.written)
    out_hashes.write(aside, hashes.signed(aside))
    digests = {path: hashes.of(aside / name) for name, path in spec.outs.items()}
    resident.keep({aside / name: digests[path] for name, path in spec.outs.items()})
    try:
        os.replace(aside, entry.out)
    except OSError:
        if not entry.out.exists():
            raise
        atomic.remove(aside)  # another shard found all done at the same moment: equal bytes
    return digests, metrics


def _stop_at_once() -> None:
    raise Stopped("before the stage began")


@contextmanager
def _on_terminate(stop: Callable[[], None], task: Task, warning: SlurmWarning) -> Iterator[None]:
    """What SIGTERM does in a job without Slurm: a stage saves its scratch and ends."""
    if task.job is not None or warning.listening:
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> int:
    """What a batch script calls, once for each process of the job."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.worker.worker")
    parser.add_argument("folder", help="the attempt's folder")
    parser.add_argument("--first-shard", type=int, default=0, help="the shard of array index 0")
    warning = SlurmWarning()
    warning.listen()
    arguments = parser.parse_args()
    folder = Path(arguments.folder)
    attempt = link.resolve(folder) if link.is_link(folder) else Attempt(folder)
    ended = run_attempt(str(attempt.folder), arguments.first_shard, warning)
    if link.is_link(folder) and ended == State.COMPLETED:
        link.pass_on(folder, attempt)
    # A rank that ends with an error has Slurm end the others, so stopping must not look like one.
    fine = (State.COMPLETED, TaskState.DONE, TaskState.STOPPED)
    status = 0 if ended in fine else BAD_NODE_STATUS if ended == TaskState.BAD_NODE else 1
    if preflight.hangs():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
