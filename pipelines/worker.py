"""The job's side: run one attempt at a stage, from its folder alone.

The outputs are written aside and renamed as a whole at the end. Whatever happens, `result.json`
says how it ended; where even that is missing, the lock `alive` is free and the worker died.
"""

import errno
import importlib
import json
import os
import platform
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Any

from pipelines import atomic
from pipelines.hashing import HashCache
from pipelines.ledger import Attempt, Entry, State, hold_lock
from pipelines.redact import RedactedStream, redact
from pipelines.spec import Spec
from stages.context import Context, StageError, Stopped
from stages.contracts.catalog import STAGES

METRICS_OUT = "metrics"
StageFunction = Callable[..., dict[str, float]]
_PASSING = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EBUSY)
"""Errors of the system that another try may not meet; a full disk or a missing file stays."""
_REPORTED_PACKAGES = ("torch", "transformers", "numpy", "pyarrow", "lockstep-rlhf")


def run_attempt(folder: str) -> str:
    """Run the attempt in `folder`; returns how it ended. This is what a submitted job calls."""
    attempt = Attempt(Path(folder))
    with (
        hold_lock(attempt.folder / "alive", wait=True),
        # A driver that was killed at the wrong moment may have led to two attempts at once.
        hold_lock(attempt.entry.folder / "working", wait=True),
    ):
        atomic.write_json(
            attempt.folder / "worker.json",
            {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time()},
        )
        with (
            redirect_stdout(RedactedStream(sys.stdout)),  # type: ignore[type-var]
            redirect_stderr(RedactedStream(sys.stderr)),  # type: ignore[type-var]
        ):
            found = {"state": State.COMPLETED} if attempt.entry.out.exists() else None
            result = found or _run(attempt)
        atomic.write_json(attempt.folder / "result.json", result)
    return str(result["state"])


def _run(attempt: Attempt) -> dict[str, Any]:
    started = time.time()
    entry = attempt.entry
    spec = entry.spec
    launch = attempt.launch or {}
    context = _context(entry, spec, launch)
    print(f"{spec.stage}: attempt {attempt.number} on {socket.gethostname()}", flush=True)
    outcome: dict[str, Any]
    try:
        with _on_terminate(_stop_at_once):
            run = importlib.import_module(STAGES[spec.name].module).run
        with _on_terminate(context.request_stop):
            outs, metrics = _compute(run, entry, spec, context, Path(launch["root"]))
        outcome = {"state": State.COMPLETED, "outs": outs, "metrics": metrics}
    except (Stopped, KeyboardInterrupt):
        outcome = {
            "state": State.CANCELLED,
            "error": "stopped at a step boundary",
            "retryable": True,
        }
    except StageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        outcome = {"state": State.FAILED, "error": redact(str(error)), "retryable": False}
    except Exception as error:
        traceback.print_exc()
        outcome = {
            "state": State.FAILED,
            "error": redact(f"{type(error).__name__}: {error}"),
            "retryable": isinstance(error, OSError) and error.errno in _PASSING,
        }
    return {**outcome, "started": started, "ended": time.time(), "environment": _environment()}


def _context(entry: Entry, spec: Spec, launch: dict[str, Any]) -> Context:
    resources = launch["resources"]
    return Context(
        stage=spec.stage,
        key=spec.key,
        seed=spec.config.get("seed", 0),
        folder=entry.folder,
        device=resources["device"],
        micro_batch=resources["micro_batch"],
        checkpoint_seconds=resources["checkpoint_seconds"],
        graph=launch.get("graph", ()),
    )


def _compute(
    run: StageFunction, entry: Entry, spec: Spec, context: Context, root: Path
) -> tuple[dict[str, str], dict[str, float]]:
    """Run the stage's function into a folder aside, then make that folder `out` in one step.

    Returns the hashes of the outputs by path, and the summary metrics.
    """
    config = STAGES[spec.name].config.model_validate(spec.config)
    aside = entry.folder / "out.tmp"
    atomic.remove(aside)
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
    (aside / METRICS_OUT).write_text(json.dumps(metrics, indent=2, sort_keys=True) + "\n")
    atomic.sync_tree(aside)
    hashes = HashCache()
    found = {path: hashes.of(aside / name) for name, path in spec.outs.items()}
    os.replace(aside, entry.out)
    shutil.rmtree(entry.folder / "scratch", ignore_errors=True)
    return found, metrics


def _stop_at_once() -> None:
    raise Stopped("before the stage began")


@contextmanager
def _on_terminate(stop: Callable[[], None]) -> Iterator[None]:
    """What SIGTERM does in here: submitit ignores it, a stage saves its scratch and ends."""
    before = signal.signal(signal.SIGTERM, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _environment() -> dict[str, Any]:
    """Which kind of machine made these bytes. Names and versions only, never the variables."""
    versions = {}
    for package in _REPORTED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "packages": versions,
    }
