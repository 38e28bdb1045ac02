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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from benchmarks.clones import copy_clone
from pipelines.ledger.entry import Attempt
from tests.conftest import TINY, Clone, copy_tree
from tests.slurm.light_stages import COUNT_TOGETHER, COUNTING_STAGE
from tests.waiting import TIMEOUT_S, until
from tools import slurm_cluster

slurm_cluster.Cluster.longest_s = TIMEOUT_S


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
    layout = slurm_cluster.Layout(folder, port=free_ports(), max_array_size=4, slurmd_timeout=120)
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


def lose_node(cluster: Any, name: str) -> None:
    """As if a node had lost power, and its silence had been noticed.

    Slurm takes minutes to miss it here: a limit as short as a test would have it, SlurmdTimeout,
    finds nodes lost that were only starved, and starts the jobs of other tests again.
    """
    cluster.kill_node(name)
    cluster.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=lost")


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


STAGE = ("python", "-m", "pipelines", "stage", "sft")
"""What DVC calls, for tests in which it has no part."""


class SlurmClone(Clone):
    """A clone whose stages run on the test's cluster, and what one looks at in it."""

    cluster: Any

    def start_sft(self) -> subprocess.Popen[str]:
        """DVC has no part in most tests: its driver is a fork of it."""
        return self.start_forked("dvc", "repro", "--single-item", "sft")

    def start_driver(self) -> subprocess.Popen[str]:
        """The driver of SFT alone, which needs no server that forks others."""
        return self.start_forked(*STAGE, LOCKSTEP_WARM="off")

    def start_training(self, *command: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        if command == STAGE:
            return self.start_driver(), self.training()
        return super().start_training(*command)

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
        whole, _, _being_written = (path.read_text() if path else "").rpartition("\n")
        return [json.loads(line)["step"] for line in whole.splitlines()]

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
    clone.run("git", "gc", "--quiet")  # a thousand files less in every copy
    return clone.root


def copy_at_home(source: Path, folder: Path) -> Clone:
    """A copy of a clone whose stages run on this machine, with nothing going to MLflow."""
    clone = Clone(copy_clone(source, folder / "clone"))
    clone.without_tracking()
    return clone


def copy_of_other_code(source: Path, folder: Path) -> Clone:
    """One whose stages are not those of this repository: no warm process has imported them."""
    clone = copy_at_home(source, folder)
    clone.variables["LOCKSTEP_WARM"] = "off"
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


@dataclass(frozen=True)
class RunOnSlurm:
    """A clone after the whole pipeline, run on the cluster, and what there was to see of it."""

    clone: SlurmClone
    output: str
    session: dict[str, Any]
    """The one that served `SERVED`, as it was begun; what follows is from before its end."""
    jobs: list[str]
    orphans: str
    sessions: list[dict[str, Any]]


SERVED = ("sft", "policy_update")
"""Stages of that run in a session, which imports their libraries once; the others have jobs."""


@pytest.fixture(scope="session")
def pipeline_on_slurm(
    prepared_root: Path, tmp_path_factory: pytest.TempPathFactory, cluster: Any
) -> RunOnSlurm:
    root = tmp_path_factory.mktemp("on-slurm") / "clone"
    copy_clone(prepared_root, root)
    clone = on_slurm(root, cluster)
    clone.set_profile(rollout={"shards": 2, "array_parallelism": 2}, score={"shards": 2})
    clone.set_profile(evaluate_sft={"nodes": 2, "sharding": "fsdp"}, evaluate={"nodes": 2})
    begun = clone.run("lockstep", "session", "up", "--stages", ",".join(SERVED), "--json").stdout
    output = clone.run("lockstep", "run").stdout
    run = RunOnSlurm(
        clone,
        output,
        session=json.loads(begun),
        jobs=clone.jobs(),
        orphans=clone.run("lockstep", "status", "--orphans").stdout,
        sessions=json.loads(clone.run("lockstep", "session", "status", "--json").stdout),
    )
    clone.run("lockstep", "session", "down")
    return run


@pytest.fixture
def slurm_clone(prepared_root: Path, tmp_path: Path, cluster: Any) -> Iterator[SlurmClone]:
    """A copy of it whose jobs go to the cluster."""
    copy_clone(prepared_root, tmp_path / "clone")
    clone = on_slurm(tmp_path / "clone", cluster)
    yield clone
    clone.kill_all()


def root_of_ranks_that_meet(source: Path, folder: Path, epochs: int) -> Path:
    """Of a clone with an SFT stage whose ranks meet at each of its steps."""
    clone = copy_of_other_code(source, folder)
    clone.set_params(sft__epochs=epochs)
    clone.write_code("stages/sft.py", COUNT_TOGETHER)
    clone.run("dvc", "repro", "code")
    clone.commit("counts")
    return clone.root


@pytest.fixture(scope="session")
def counting_root(
    prepared_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """Of a clone whose SFT counts so many epochs instead of training. Read it, do not change it.

    The libraries of the real one take ten seconds to import.
    """

    counting = copy_of_other_code(prepared_root, tmp_path_factory.mktemp("counting"))
    counting.write_code("stages/sft.py", COUNTING_STAGE)
    counting.run("dvc", "repro", "code")  # as `lockstep run` does; `--single-item` leaves it

    @cache
    def make(epochs: int) -> Path:
        clone = copy_of_other_code(counting.root, tmp_path_factory.mktemp(f"counting-{epochs}"))
        clone.set_params(sft__epochs=epochs)
        clone.commit("counts")
        return clone.root

    return make


@pytest.fixture
def counting_clone(
    counting_root: Callable[[int], Path], tmp_path: Path, cluster: Any
) -> Iterator[Callable[[int], SlurmClone]]:
    """A copy of one whose jobs go to the cluster."""
    with contextlib.ExitStack() as stack:

        def make(epochs: int) -> SlurmClone:
            copy_clone(counting_root(epochs), tmp_path / "clone")
            clone = on_slurm(tmp_path / "clone", cluster)
            stack.callback(clone.kill_all)
            return clone

        yield make


@pytest.fixture
def long_sft(counting_clone: Callable[[int], SlurmClone]) -> SlurmClone:
    """With an SFT stage that is at work for long enough to be caught at it."""
    return counting_clone(20_000)


@pytest.fixture
def medium_sft(counting_clone: Callable[[int], SlurmClone]) -> SlurmClone:
    """With an SFT stage that ends when it is released, to be disturbed before."""
    clone = counting_clone(60)
    clone.hold()
    return clone


@pytest.fixture
def quick_sft(counting_clone: Callable[[int], SlurmClone]) -> SlurmClone:
    """With an SFT stage that ends at once."""
    return counting_clone(1)


@pytest.fixture(scope="session")
def undisturbed_lock(
    counting_root: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """dvc.lock after the medium SFT stage, run on this machine and left in peace."""
    clone = copy_of_other_code(counting_root(60), tmp_path_factory.mktemp("undisturbed"))
    clone.run("dvc", "repro", "--single-item", "sft")
    return (clone.root / "dvc.lock").read_text()
