"""A clone with a ledger as jobs leave it behind, written through the same classes."""

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from mlflow import MlflowClient
from mlflow.entities import Run

from pipelines.base import atomic
from pipelines.base.locks import hold_lock
from pipelines.base.processes import start_of
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.export.registry import register_last
from pipelines.identity.spec import Artifact, Spec
from pipelines.ledger.entry import Attempt, Entry, Ledger
from pipelines.ledger.invocation import Invocation
from pipelines.ledger.publish import publish
from pipelines.ledger.record import Origin
from pipelines.tracking.rounds import Tracker
from stages.contracts.catalog import bind
from tests.conftest import kill_each
from tests.ledger_values import launch, result, worker

DIGEST = "0123456789abcdef0123456789abcdef.dir"


class FakeClone:
    """A clone with a ledger in which jobs start, talk and end at a test's word."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True)
        (root / "params.yaml").write_text("seed: 17\n")
        (root / "dvc.yaml").write_text("stages: {}\n")
        self.root = root
        self.repository = Repository(root)
        self.ledger = Ledger(self.repository.jobs)
        self._locks: dict[Path, ExitStack] = {}

    def entry(
        self, stage: str, *, invocation: str = "run", pid: int | None = None, seed: int = 17
    ) -> Entry:
        bound = bind(stage, load_params(self.root))
        spec = Spec(
            stage=stage,
            name=bound.stage.name,
            key=bound.key,
            config={**bound.config.model_dump(mode="json", by_alias=True), "seed": seed},
            code="c0de",
            inputs={name: Artifact(path, DIGEST) for name, path in bound.inputs.items()},
            outs=dict(bound.outs),
            metrics=bound.metrics,
        )
        origin = Origin(
            invocation=Invocation(invocation, "dvc repro", pid, start_of(pid) if pid else ""),
            git_commit="f00d",
            experiment="brave-owl",
            title="grpo · verifier",
        )
        return self.ledger.find_or_create(spec, origin)

    def begin(self, stage: str, *, steps: int = 0) -> Entry:
        """A stage whose first job runs."""
        entry = self.entry(stage)
        self.start(entry, steps=steps)
        return entry

    def start(self, entry: Entry, *, steps: int = 0, invocation: str | None = None) -> Attempt:
        """A job that lives until `die` or `finish`, by another command than the entry's or not."""
        behind = Invocation(invocation, "dvc repro") if invocation else None
        order = launch(profile="laptop", job="77", time=time.time(), invocation=behind)
        attempt = entry.new_attempt(order)
        attempt.write(worker(host="node-1"))
        (attempt.folder / "77_0_log.out").write_text("hello\n")
        (attempt.folder / "77_0_log.err").write_text("")
        locks = self._locks[entry.folder] = ExitStack()
        locks.enter_context(hold_lock(attempt.folder / "alive"))
        self.log(entry, range(1, steps + 1))
        return attempt

    def log(self, entry: Entry, steps: range, **metrics: float) -> None:
        with (entry.folder / "metrics.jsonl").open("a") as file:
            for step in steps:
                values = metrics or {"loss": 1 / step, "kl": 0.1}
                row = {"step": step, "time": time.time(), "metrics": values}
                file.write(json.dumps(row) + "\n")

    def table(self, entry: Entry, rows: list[dict[str, Any]]) -> None:
        atomic.write_text(entry.folder / "tables" / "samples.json", json.dumps(rows))

    def end(self, entry: Entry, state: str, **more: Any) -> None:
        """The worker's result, and its end."""
        times = {"started": time.time() - 1, "ended": time.time()}
        entry.attempts()[-1].write(result(state, **{**times, **more}))
        self.die(entry)

    def die(self, entry: Entry) -> None:
        self._locks.pop(entry.folder).close()

    def finish(self, entry: Entry, metrics: dict[str, float] | None = None) -> None:
        """Outputs, last word, and publication."""
        self.complete(entry, metrics)
        publish(self.root, entry)

    def complete(self, entry: Entry, metrics: dict[str, float] | None = None) -> None:
        """Outputs and last word, as a worker leaves them to its driver."""
        spec = entry.spec
        for name in spec.outs:
            (entry.out / name).mkdir(parents=True)
            (entry.out / name / "summary.md").write_text(f"{spec.stage} {name}")
        metrics = metrics or {"loss": 0.5}
        atomic.write_json(entry.out / "metrics", metrics)
        outs = {path: f"{abs(hash(path)):032x}"[:32] + ".dir" for path in spec.outs.values()}
        self.end(entry, "completed", outs=outs, metrics=metrics)

    def run(self, stage: str, metrics: dict[str, float] | None = None, **options: Any) -> Entry:
        """A whole job, from submission to publication."""
        entry = self.entry(stage, **options)
        self.start(entry, steps=3)
        self.finish(entry, metrics)
        return entry

    def sync(self) -> str | None:
        """One round of a shipper that has just been started."""
        return self.tracker().sync()

    def tracker(self) -> Tracker:
        """What a shipper has that has just been started."""
        tracker = Tracker(self.repository, register_last)
        assert tracker.connect()
        return tracker

    def cursor(self, entry: Entry) -> dict[str, Any]:
        return atomic.read_json(entry.folder / "tracking.json") or {}

    def shippers(self) -> list[psutil.Process]:
        """The shippers of this clone that live."""
        return self.processes_of("pipelines.export.shipping")

    def processes_of(self, module: str) -> list[psutil.Process]:
        """The living processes that run a module for this clone."""
        everything = self.processes().items()
        return [process for process, words in everything if module in words]

    def processes(self) -> dict[psutil.Process, list[str]]:
        """Those that run anything for it, and the words they were started with."""
        found = {}
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if str(self.root) in words:
                found[process] = words
        return found

    def kill_shipper(self) -> None:
        """The one that there is, unless it has left by itself."""
        shippers = self.shippers()
        assert len(shippers) <= 1
        kill_each(shippers)
        psutil.wait_procs(shippers)

    @property
    def uri(self) -> str:
        return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.root}/.lockstep/mlflow.db"

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.uri)

    def runs(self, where: str = "") -> list[Run]:
        experiment = self.client.get_experiment_by_name("lockstep")
        return (
            list(self.client.search_runs([experiment.experiment_id], where)) if experiment else []
        )

    def run_of(self, stage: str) -> Run:
        [run] = self.runs(f"tags.`lockstep.address` = '{stage}'")
        return self.client.get_run(run.info.run_id)

    def parent(self) -> Run:
        [run] = self.runs("tags.`lockstep.kind` = 'invocation'")
        return self.client.get_run(run.info.run_id)

    def steps(self, run: Run, key: str) -> list[int]:
        return [metric.step for metric in self.client.get_metric_history(run.info.run_id, key)]

    def close(self) -> None:
        for locks in self._locks.values():
            locks.close()
