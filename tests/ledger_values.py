"""What lies in the ledger's files, made up: for tests that write a ledger without running it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.config.profiles import ExecutorKind, Resources
from pipelines.ledger.invocation import Invocation
from pipelines.ledger.launch import Launch
from pipelines.ledger.record import Origin, Record
from pipelines.ledger.reports import Result, TaskReport, Worker
from pipelines.ledger.state import State, TaskState

ORIGIN = Origin(
    invocation=Invocation("i", "dvc repro"), git_commit="c", experiment=None, title="a title"
)
LOCAL, SLURM = ExecutorKind.LOCAL, ExecutorKind.SLURM


def launch(executor: ExecutorKind = LOCAL, **changes: Any) -> Launch:
    nowhere = Path("/nowhere")
    plain = Launch(
        executor=executor,
        profile="local",
        resources=Resources(),
        clone=nowhere,
        root=nowhere,
        code=nowhere,
        user=os.getuid(),
    )
    return replace(plain, **changes)


def worker(**changes: Any) -> Worker:
    return replace(Worker(pid=1, host="here", time=1.0), **changes)


def result(state: str = "completed", **changes: Any) -> Result:
    return replace(Result(state=State(state), started=1.0, ended=2.0), **changes)


def task_report(state: State | TaskState, **changes: Any) -> TaskReport:
    plain = TaskReport(
        rank=0,
        shard=0,
        num_shards=1,
        job="7",
        host="here",
        pid=1,
        restart=0,
        log="",
        what="",
        state=state,
        time=1.0,
    )
    return replace(plain, **changes)


def record(**changes: Any) -> Record:
    plain = Record(
        stage="sft",
        fingerprint="f",
        inputs={},
        outs={},
        metrics={},
        attempts=1,
        started=1.0,
        ended=2.0,
        published=3.0,
        environment={},
        git_commit=None,
        experiment=None,
        invocation=ORIGIN.invocation,
    )
    return replace(plain, **changes)
