"""The job's side: run one attempt at a stage, from its folder alone.

The outputs are written aside and renamed as a whole at the end. Whatever happens, `result.json`
says how it ended; where even that is missing, the worker died. A job may have many processes, each
with a word of its own in `tasks/`; the one that writes the outputs has the word for all.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.console import say_anything
from pipelines.base.locks import hold_lock
from pipelines.base.redact import RedactedStream, redact
from pipelines.base.redacted_log import redacted_log
from pipelines.config.profiles import ExecutorKind
from pipelines.identity import environment
from pipelines.identity.hashing import HashCache
from pipelines.identity.spec import Spec
from pipelines.ledger.entry import FAILURE_PREFIX, METRICS_OUT, Attempt, Entry, State, TaskState
from pipelines.ledger.environments import note_environment
from pipelines.ledger.task import Task, find_task
from pipelines.slurm import link
from pipelines.slurm.restarts import refuse_endless_restarts, stop_or_requeue
from pipelines.slurm.signals import SlurmWarning
from pipelines.worker.inputs import check_inputs
from pipelines.worker.rendezvous import among_ranks
from stages.context import Context, RankLost, ShareDone, StageError, Stopped
from stages.contracts.base import Processes
from stages.contracts.catalog import STAGES
from stages.contracts.sharding import Offload, Sharding
from stages.engines.models import resident
from stages.engines.processes import determinism

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
    launch = attempt.launch or {}
    # Slurm's variables also stand around a job of another kind, started inside an allocation.
    on_slurm = attempt.on_slurm
    task = find_task(stage.processes, launch["num_shards"], first_shard) if on_slurm else Task()
    if task.idle:
        return TaskState.DONE
    with (
        _alive(attempt, task),
        # A driver that was killed at the wrong moment may have led to two attempts at once.
        hold_lock(attempt.entry.folder / f"working.{task.label}", wait=True),
    ):
        outcome: dict[str, Any]
        # Slurm may bring back a job that is done, after a node's failure say: its word stands.
        done = attempt.entry.out.exists() or attempt.entry.record is not None
        _say_hello(attempt, task, done)
        if done:
            outcome = {"state": State.COMPLETED}
        elif attempt.was_cancelled:
            # Slurm has brought back a job that nobody wants any more.
            outcome = {"state": State.CANCELLED, "error": "cancelled before it began"}
        else:
            with _redacted(launch):
                outcome = _run(attempt, launch, task, warning)
        _say_goodbye(attempt, task, outcome, keep=done)
    return str(outcome["state"])


@contextmanager
def _redacted(launch: dict[str, Any]) -> Iterator[None]:
    """A debugged stage has no log: a debugger needs the terminal as it is."""
    if launch["executor"] != ExecutorKind.DEBUG:
        with redacted_log():
            yield
        return
    with (
        redirect_stdout(RedactedStream(sys.stdout)),  # type: ignore[type-var]
        redirect_stderr(RedactedStream(sys.stderr)),  # type: ignore[type-var]
    ):
        yield


@contextmanager
def _alive(attempt: Attempt, task: Task) -> Iterator[None]:
    """How a job without Slurm shows that it lives; of others, Slurm tells."""
    if task.job is not None:
        yield
        return
    with hold_lock(attempt.folder / "alive", wait=True):
        yield


def _say_hello(attempt: Attempt, task: Task, done: bool) -> None:
    me = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time()}
    if task.job is not None:
        _say(attempt, task, {"state": TaskState.RUNNING})
    if done:
        return
    if task.job is not None and task.restart and task.leads:
        # The word of an earlier start of the same job no longer holds.
        (attempt.folder / "result.json").unlink(missing_ok=True)
    if task.leads and not (task.num_shards > 1 and attempt.worker):
        # How far an earlier start of the job was is not how far this one is.
        (attempt.entry.folder / "progress.json").unlink(missing_ok=True)
        atomic.write_json(attempt.folder / "worker.json", {**me, "restart": task.restart})


def _add_environment(attempt: Attempt, made_by: dict[str, Any]) -> None:
    """Kept from the start: whoever finds outputs without a last word still knows what made them."""
    worker = attempt.worker or {}
    if (worker.get("pid"), worker.get("host")) == (os.getpid(), socket.gethostname()):
        word = {**worker, "environment": made_by}
        atomic.write_json(attempt.folder / "worker.json", word)


def _say_goodbye(attempt: Attempt, task: Task, outcome: dict[str, Any], *, keep: bool) -> None:
    """With `keep`, a word that is there already stays: it says more than this process knows."""
    if task.job is not None:
        _say(attempt, task, {key: outcome.get(key) for key in ("state", "error")})
    final = outcome["state"] in (State.COMPLETED, State.CANCELLED, State.FAILED)
    shares = task.num_shards > 1 and outcome["state"] != State.COMPLETED
    if final and task.leads and not shares and not (keep and attempt.result):
        atomic.write_json(attempt.folder / "result.json", outcome)


def _say(attempt: Attempt, task: Task, word: dict[str, Any]) -> None:
    """Leave this process's last word."""
    me = {"rank": task.rank, "shard": task.shard, "num_shards": task.num_shards, "job": task.job}
    me |= {"host": socket.gethostname(), "pid": os.getpid(), "restart": task.restart}
    me |= {"log": task.log, "what": task.what()}
    where = attempt.folder / "tasks" / f"{task.label}.json"
    atomic.write_json(where, {**me, **word, "time": time.time()})
    alarm = attempt.folder / "tasks" / f"{FAILURE_PREFIX}{task.label}"
    if word["state"] == State.FAILED:
        alarm.touch()
    else:
        alarm.unlink(missing_ok=True)


def _run(
    attempt: Attempt, launch: dict[str, Any], task: Task, warning: SlurmWarning
) -> dict[str, Any]:
    started = time.time()
    entry = attempt.entry
    spec = entry.spec
    context = _context(attempt, spec, launch, task)
    warning.answer(context.request_stop)
    again = f", restart {task.restart}" if task.restart else ""
    who = " ".join(filter(None, [task.what(), f"on {socket.gethostname()}"]))
    print(f"{spec.stage}: attempt {attempt.number}{again}, {who}", flush=True)
    made_by: dict[str, Any] = {}
    outcome: dict[str, Any]
    try:
        _check_code(launch)
        made_by = environment.describe(context, launch["resources"])
        _add_environment(attempt, made_by)
        refuse_endless_restarts(launch, task)
        with _on_terminate(_stop_at_once, task, warning), among_ranks(task, context) as meet_all:
            if launch["resources"]["deterministic"]:
                determinism.before_import()
            run = importlib.import_module(STAGES[spec.name].module).run
            if launch["resources"]["deterministic"]:
                determinism.after_import()
            made_by = environment.describe(context, launch["resources"])
            _add_environment(attempt, made_by)
            if task.leads:
                note_environment(attempt, task, made_by)
            if task.reads_for_its_node:
                check_inputs(spec, Path(launch["root"]), context.should_stop)
            meet_all()
        root = Path(launch["root"])
        hashes = {root / artifact.path: artifact.hash for artifact in spec.inputs.values()}
        with _on_terminate(context.request_stop, task, warning), resident.among(hashes):
            outs, metrics = _compute(run, entry, spec, context, root, task.label)
        outcome = {"state": State.COMPLETED, "outs": outs, "metrics": metrics}
    except ShareDone:
        outcome = {"state": TaskState.DONE}
    except (Stopped, KeyboardInterrupt):
        outcome = stop_or_requeue(attempt, launch, task)
    except RankLost as error:
        # The rank that is gone, or its node, is what failed; Slurm knows how and what comes next.
        print(f"error: {error}", file=sys.stderr, flush=True)
        outcome = {"state": TaskState.LOST_A_RANK, "error": redact(str(error))}
    except StageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        outcome = {"state": State.FAILED, "error": redact(str(error)), "retryable": False}
    except Exception as error:
        traceback.print_exc()
        if context.should_stop():
            # What was told to stop with the worker, a helper process, may go first.
            outcome = stop_or_requeue(attempt, launch, task)
        else:
            outcome = {
                "state": State.FAILED,
                "error": redact(_in_words(error, entry)),
                "retryable": _may_pass(error, attempt),
            }
    return {**outcome, "started": started, "ended": time.time(), "environment": made_by}


def _check_code(launch: dict[str, Any]) -> None:
    """Whether this process runs the copy of the code that its result will be recorded for."""
    # A debugged stage runs in the command's own process, and with the command's own code.
    if launch["executor"] != ExecutorKind.DEBUG and Path(launch["code"]).resolve() != CODE:
        raise StageError(
            f"this job has its code from {CODE}, not from {launch['code']}, the copy made for it: "
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


def _context(attempt: Attempt, spec: Spec, launch: dict[str, Any], task: Task) -> Context:
    resources = launch["resources"]
    one_gpu_each = resources["device"] == "cuda" and task.job is not None
    together = STAGES[spec.name].processes is Processes.TOGETHER
    signs = attempt.folder / "restarts" / f"{task.restart:03}"
    if task.world > 1:
        signs.mkdir(parents=True, exist_ok=True)
    return Context(
        stage=spec.stage,
        key=spec.key,
        seed=spec.config.get("seed", 0),
        folder=attempt.entry.folder,
        device=f"cuda:{task.local_rank}" if one_gpu_each else resources["device"],
        rank=task.rank,
        world=task.world,
        collective_seconds=resources["collective_seconds"],
        heartbeats=signs if task.world > 1 else None,
        shard=task.shard,
        num_shards=task.num_shards,
        micro_tokens=resources["micro_tokens"],
        compile=resources["compile"],
        checkpoint_activations=resources["checkpoint_activations"],
        sharding=Sharding(resources["sharding"]) if together else Sharding.NONE,
        offload=Offload(resources["offload"]) if together else Offload.NONE,
        tensor_parallel=resources["tensor_parallel"],
        generator_memory=resources["generator_memory"],
        sequence_parallel=resources["sequence_parallel"] if together else 1,
        checkpoint_seconds=resources["checkpoint_seconds"],
        graph=atomic.read_json(attempt.folder / "graph.json") or launch.get("graph", ()),
    )


def _compute(
    run: StageFunction, entry: Entry, spec: Spec, context: Context, root: Path, label: str
) -> tuple[dict[str, str], dict[str, float]]:
    """Run the stage's function into a folder aside, then make that folder `out` in one step.

    Returns the hashes of the outputs by path, and the summary metrics.
    """
    config = STAGES[spec.name].config.from_values(spec.config, spec.key)
    for left in entry.folder.glob(f"out.{label}.*"):
        atomic.remove(left)  # by a process that was killed
    aside = entry.folder / f"out.{label}.{atomic.here()}.{os.getpid()}"
    aside.mkdir()
    out = {name: aside / name for name in spec.outs}
    inputs = {name: root / artifact.path for name, artifact in spec.inputs.items()}
    try:
        metrics = run(config, inputs, out, context)
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
        link.hand_on(folder, attempt)
    # A rank that ends with an error has Slurm end the others, so stopping must not look like one.
    fine = (State.COMPLETED, TaskState.DONE, TaskState.STOPPED)
    return 0 if ended in fine else 1


if __name__ == "__main__":
    sys.exit(main())
