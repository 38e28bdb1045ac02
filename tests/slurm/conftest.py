"""A real Slurm cluster for the whole session, and clones whose jobs go there.

These tests need slurmctld, slurmd and munged; as root on Debian or Ubuntu,
`python tools/slurm_cluster.py install` fetches them.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from pipelines.ledger.entry import Attempt
from tests.conftest import TINY, Clone, copy_tree
from tests.waiting import until
from tools import slurm_cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.slurm)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_not() -> str | None:
    """What keeps a cluster from running here."""
    try:
        slurm_cluster._check_programs()
        slurm_cluster._loopback_address()
    except slurm_cluster.ClusterError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Four nodes, some of them with fake GPUs. The folder is short: it holds a socket."""
    folder = Path(tempfile.mkdtemp(prefix="ls-"))
    layout = slurm_cluster.Layout(folder, port=free_ports(), max_array_size=4, slurmd_timeout=20)
    cluster = slurm_cluster.Cluster(layout)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _whole_cluster(cluster: Any) -> Iterator[None]:
    """Every test begins with all daemons up, no job, and no drained node."""

    def no_job_is_left() -> bool:
        try:
            cluster.cancel_all()
            return not cluster.run("squeue", "--noheader")
        except (slurm_cluster.ClusterError, subprocess.TimeoutExpired):
            return False

    cluster.up()
    yield
    cluster.up()
    until(no_job_is_left, "the cluster has no job any more")


def free_ports(count: int = 20) -> int:
    """The first of `count` ports that nobody listens at; no two test processes look at the same."""
    place = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for first in range(20100 + 2000 * place, 60000, count):
        with socket.socket() as probe:
            try:
                for port in range(first, first + count):
                    with socket.socket() as probe:
                        probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    pytest.fail("no free ports")


def let_the_controller_save(cluster: Any) -> None:
    """What it has not saved is lost when it is killed, and it gives the numbers of jobs again.

    A submission makes it save, within seconds; a start by the backfill scheduler does not.
    """
    began = time.time()
    cluster.run("sbatch", "--hold", "--output=/dev/null", "--wrap=true")
    saved = cluster.folder / "state" / "job_state"

    def has_saved() -> bool:
        try:
            return saved.stat().st_mtime > began
        except FileNotFoundError:
            # It takes the old one away before it puts the new one there.
            return False

    until(has_saved, "the controller saves its state")


MEDIUM = 200
"""Epochs of a real SFT stage of some seconds."""
ONE_RANK = """
from contextlib import nullcontext


class OneRank:
    def same(self, value):
        return value

    def agree_to_stop(self, wanted, where):
        return wanted


def join(ctx):
    return nullcontext(OneRank())
"""
COUNT = """
import hashlib
import os
import time

from stages.context import Stopped


def run(config, inputs, out, ctx):
    state = ctx.scratch / "checkpoint-1"
    hold = ctx.folder.parents[3] / "hold"
    epochs = config.sft.epochs

    def save(step):
        if ctx.rank == 0:
            aside = state.with_suffix(".tmp")
            aside.write_text(f"{step} {made}")
            os.replace(aside, state)

    with join(ctx) as ranks:
        found = state.read_text().split() if state.exists() else ("0", "nothing")
        done, made = ranks.same(found)
        ctx.resume_at(int(done))
        saved = time.monotonic()
        for step in range(int(done), epochs):
            while step == epochs - 1 and hold.exists() and not ctx.should_stop():
                time.sleep(0.05)
            stop = ranks.agree_to_stop(ctx.should_stop(), f"step {step + 1}")
            if stop:
                save(step)
                raise Stopped(f"stopped after step {step}")
            if time.monotonic() - saved > ctx.checkpoint_seconds:
                save(step)
                saved = time.monotonic()
            time.sleep(0.05)
            made = hashlib.sha256(f"{made} {step}".encode()).hexdigest()
            ctx.log(step + 1, {"loss": 1.0})
            ctx.progress(step + 1, epochs, loss=1.0)
    for path in out.values():
        path.mkdir()
        (path / "done").write_text(made)
    return {"loss": 1.0}
"""
COUNTING_STAGE = ONE_RANK + COUNT
"""For sft: no libraries to import; its bytes show that each step was made once, in order."""
COUNT_TOGETHER = f"from stages.engines.processes.ranks import join\n{COUNT}"
"""Ranks that meet at every step as those that train do, without a model and its libraries."""
DIGESTING_STAGE = """
import hashlib

from stages.engines.processes.parts import Pass, collect, fill


def run(config, inputs, out, ctx):
    seen = hashlib.sha256(f"{config.model_dump_json()} {list(ctx.graph)}".encode())
    for name, given in sorted(inputs.items()):
        for path in sorted([given, *given.rglob("*")]):
            if path.is_file():
                seen.update(f"{name} {path.relative_to(given)} ".encode() + path.read_bytes())

    def digests(unit):
        return [hashlib.sha256(f"{seen.hexdigest()} {row}".encode()).hexdigest() for row in unit]

    work = Pass("digests", 8, 1, lambda: digests)
    fill(ctx, work)
    made = "".join(collect(ctx, work))
    for name, path in out.items():
        path.mkdir()
        (path / "digest").write_text(f"{name} {made}")
    return {"loss": 1.0}
"""
"""For any stage: no libraries to import; its bytes depend on all that it was given."""


class SlurmClone(Clone):
    """A clone whose stages run on the test's cluster, and what one looks at in it."""

    cluster: Any

    def set_profile(self, **changes: Any) -> None:
        """Change the profile slurm-dev: a value of the defaults, or a mapping of a stage."""
        yaml = YAML()
        path = self.root / "slurm_profiles/slurm-dev.yaml"
        profile = yaml.load(path)
        for key, value in changes.items():
            if isinstance(value, dict):
                profile.setdefault("stages", {}).setdefault(key, {}).update(value)
            else:
                profile["defaults"][key] = value
        yaml.dump(profile, path)

    def begin_with(self, stage: str, lines: str) -> None:
        """Let a stage's `run` begin with these lines."""
        path = self.root / f"stages/{stage}.py"
        code = path.read_text()
        head = re.search(r"^def run\(.*?\)(?: -> [^\n]*)?:\n", code, re.DOTALL | re.MULTILINE)
        assert head, path
        self.write_code(f"stages/{stage}.py", code[: head.end()] + lines + code[head.end() :])

    def hold(self) -> None:
        """Let an SFT stage that counts wait before its last step."""
        (self.root / "hold").touch()

    def release(self) -> None:
        (self.root / "hold").unlink()

    def is_at_work(self) -> bool:
        """Whether anything can still change here: a job in the queue, or a process."""
        try:
            return bool(self.jobs() or self.processes())
        except (slurm_cluster.ClusterError, subprocess.TimeoutExpired):
            return True  # the controller is down: who knows

    def steps(self, stage: str = "sft") -> list[int]:
        """The steps logged so far, over all attempts."""
        path = next(iter(self.root.glob(f".lockstep/jobs/{stage}/*/metrics.jsonl")), None)
        lines = path.read_text().splitlines() if path else []
        return [json.loads(line)["step"] for line in lines]

    def attempt(self, number: int = 1, stage: str = "sft") -> Attempt:
        return Attempt(next(self.root.glob(f".lockstep/jobs/{stage}/*/attempts/{number:03}")))

    def workers(self, stage: str = "sft") -> list[Any]:
        """The processes that run the stage, by rank."""
        ranks = {}
        for process, words in self.command_lines().items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if (
                    "pipelines.worker.worker" in words
                    and f"/{stage}/" in " ".join(words)
                    and not process.name().startswith(("srun", "slurm"))
                ):
                    ranks[process] = int(process.environ().get("SLURM_PROCID", 0))
        return sorted(ranks, key=ranks.__getitem__)

    def lock(self) -> str:
        return (self.root / "dvc.lock").read_text()

    def jobs(self) -> list[str]:
        """The numbers of live jobs."""
        return self.cluster.run("squeue", "-h", "-o", "%i").split()


def on_slurm(root: Path, cluster: Any) -> SlurmClone:
    """The clone at `root`, its jobs going to the cluster and nothing to MLflow."""
    clone = SlurmClone(root)
    clone.cluster = cluster
    clone.without_tracking()
    clone.variables |= {**cluster.environment, "LOCKSTEP_PROFILE": "slurm-dev"}
    return clone


PARAMS = {
    **TINY,
    "rollout__batch_size": 4,
    "rollout__prompts": 16,
    "rollout__samples": 2,
}
"""A tiny pipeline with eight decoding batches, for shards to share."""
STAGES = ("sft", "reward_model", "rollout", "score", "policy_update", "evaluate", "report")
"""All that have a module of their own, but for the one that prepares."""


@pytest.fixture(scope="session")
def prepared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny clone whose data is prepared, without Slurm. Read it, do not change it."""
    clone = copy_tree(tmp_path_factory.mktemp("prepared") / "clone")
    clone.without_tracking()
    clone.set_params(**PARAMS)
    clone.run("dvc", "repro", "prepare")
    clone.commit("prepared")
    return clone.root


def copy_at_home(source: Path, folder: Path) -> Clone:
    """A copy of a clone whose stages run on this machine, with nothing going to MLflow."""
    shutil.copytree(source, folder / "clone", symlinks=True)
    clone = Clone(folder / "clone")
    clone.without_tracking()
    return clone


@pytest.fixture(scope="session")
def pipeline_root(prepared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of it after the whole pipeline, run on this machine, in one process to save time."""
    clone = copy_at_home(prepared_root, tmp_path_factory.mktemp("pipeline"))
    clone.run("lockstep", "session", "up", "--stages", ",".join((*STAGES, "evaluate_sft")))
    clone.run("lockstep", "run")
    clone.run("lockstep", "session", "down")
    return clone.root


@pytest.fixture(scope="session")
def pipeline_lock(pipeline_root: Path) -> str:
    """dvc.lock after the whole tiny pipeline, run on this machine."""
    return (pipeline_root / "dvc.lock").read_text()


@pytest.fixture(scope="session")
def pipeline_on_slurm(
    prepared_root: Path, tmp_path_factory: pytest.TempPathFactory, cluster: Any
) -> tuple[SlurmClone, str]:
    """A clone after the whole pipeline, run on the cluster, and what the command said."""
    root = tmp_path_factory.mktemp("on-slurm") / "clone"
    shutil.copytree(prepared_root, root, symlinks=True)
    clone = on_slurm(root, cluster)
    clone.set_profile(rollout={"shards": 3, "array_parallelism": 2}, score={"shards": 2})
    clone.set_profile(evaluate_sft={"tasks_per_node": 2, "sharding": "fsdp"})
    return clone, clone.run("lockstep", "run").stdout


@pytest.fixture
def slurm_clone(prepared_root: Path, tmp_path: Path, cluster: Any) -> Iterator[SlurmClone]:
    """A copy of it whose jobs go to the cluster."""
    root = tmp_path / "clone"
    shutil.copytree(prepared_root, root, symlinks=True)
    clone = on_slurm(root, cluster)
    yield clone
    clone.kill_all()


def count(clone: Any, epochs: int) -> None:
    """Let SFT count instead of training, because its libraries take ten seconds to import."""
    clone.set_params(sft__epochs=epochs)
    clone.write_code("stages/sft.py", COUNTING_STAGE)
    clone.run("dvc", "repro", "code")  # as `lockstep run` does; `--single-item` leaves it
    clone.commit("counts")


@pytest.fixture
def long_sft(slurm_clone: SlurmClone) -> SlurmClone:
    """With an SFT stage that is at work for long enough to be caught at it."""
    count(slurm_clone, 20_000)
    return slurm_clone


@pytest.fixture
def medium_sft(slurm_clone: SlurmClone) -> SlurmClone:
    """With an SFT stage that ends when it is released, to be disturbed before."""
    count(slurm_clone, 60)
    slurm_clone.hold()
    return slurm_clone


@pytest.fixture
def quick_sft(slurm_clone: SlurmClone) -> SlurmClone:
    """With an SFT stage that ends at once."""
    count(slurm_clone, 1)
    return slurm_clone


@pytest.fixture
def real_sft(slurm_clone: SlurmClone) -> SlurmClone:
    """With the real SFT stage, of some ten seconds."""
    slurm_clone.set_params(sft__epochs=MEDIUM)
    return slurm_clone


@pytest.fixture(scope="session")
def undisturbed_lock(prepared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """dvc.lock after the medium SFT stage, run on this machine and left in peace."""
    clone = copy_at_home(prepared_root, tmp_path_factory.mktemp("undisturbed"))
    count(clone, 60)
    clone.run("dvc", "repro", "--single-item", "sft")
    return (clone.root / "dvc.lock").read_text()


@pytest.fixture(scope="session")
def real_lock(prepared_root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """dvc.lock after the real SFT stage, run on this machine and left in peace."""
    clone = copy_at_home(prepared_root, tmp_path_factory.mktemp("real"))
    clone.set_params(sft__epochs=MEDIUM)
    clone.run("dvc", "repro", "--single-item", "sft")
    return (clone.root / "dvc.lock").read_text()
