"""Throwaway clones of this repository, small enough to run whole pipelines in."""

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from hypothesis import HealthCheck, settings
from ruamel.yaml import YAML

from benchmarks.clones import copy_working_tree
from pipelines.base.repository import Repository
from pipelines.config.profiles import Resources
from pipelines.identity import code
from pipelines.identity.map_files import write_maps
from pipelines.warm.identity import is_switched_off
from stages.contracts.catalog import STAGES
from tests.cost import pytest_terminal_summary  # noqa: F401  (a hook of pytest's)
from tests.forks import fork_command, fork_servers, run_forked
from tests.hardware import HAS_GPU
from tests.waiting import until

# The same examples each time, however long each takes.
settings.register_profile(
    "usual", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("usual")

if not HAS_GPU:
    # Read when Triton is imported, by whomever.
    os.environ["TRITON_INTERPRET"] = "1"
_OF_THE_MACHINE = ("MLFLOW_", "PREFECT_", "LOCKSTEP_", "DVC_", "OPENLINEAGE_")
ONE_PROCESS_EACH = ("slurm", "pipeline", "chaos", "prefect", "tracking", "lineage")
"""Folders whose tests share something that takes long to make, the longest to run first."""
ALONE = ("test_default_pipeline.py",)
"""Long tests that share nothing with their folder."""
SLOW = (
    *(f"tests/{name}/" for name in (*ONE_PROCESS_EACH, "convergence", "recipes")),
    *(
        f"tests/stages/test_{name}.py"
        for name in (
            *("algorithms", "benchmarks", "capabilities", "determinism", "environments"),
            *("evaluate", "kernels", "kernels_compile", "lora", "online", "online_ranks"),
            *("packed", "parts", "precision", "ranks", "readers", "resume", "spread", "stages"),
            *("verifiers", "vllm"),
        )
    ),
    *(f"tests/sandbox/test_{name}.py" for name in ("attacks", "code", "sandbox", "verdict")),
    *("tests/data/test_streams.py", "tests/models/test_exported.py", "tests/rewards/test_graph.py"),
)
"""Begin the names of tests that `make quick` leaves out: whole files that take half a minute, and
folders whose tests run commands. Single tests are marked where they are."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what takes long, and leave out what needs a GPU where there is none."""
    if item.nodeid.startswith(SLOW):
        item.add_marker(pytest.mark.slow)
    if item.get_closest_marker("gpu") and not HAS_GPU:
        item.add_marker(pytest.mark.skip(reason="there is no GPU"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the tests (`-n`), the longest come first."""
    first = (*ALONE, *ONE_PROCESS_EACH)

    def place(item: pytest.Item) -> int:
        group = _group(item.nodeid)
        return first.index(group) if group in first else len(first)

    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that belong together run in one process; `--no-loadscope-reorder` keeps their order."""
    from xdist.scheduler import LoadScopeScheduling

    class TogetherInOneProcess(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return TogetherInOneProcess(config, log)


def _group(nodeid: str) -> str:
    path = Path(nodeid.partition("::")[0])
    folder = path.parent.name
    return folder if folder in ONE_PROCESS_EACH and path.name not in ALONE else path.name


SERVER = "pipelines.warm.server"
OF_A_PIPELINE = "prepare,sft,reward_model,rollout,score,policy_update,evaluate,evaluate_sft,report"
"""Every stage of the pipeline as it ships."""


class Clone:
    """A copy of the working tree in a repository of its own, and the commands a user types."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.variables: dict[str, str] = {}
        self.has_servers = False

    @property
    def environment(self) -> dict[str, str]:
        """As after `source .venv/bin/activate`, with nothing of the machine's own tracking."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_OF_THE_MACHINE)
        }
        # A clone's processes share what they compile, whatever this machine's settings are.
        kept.pop("PYTHONDONTWRITEBYTECODE", None)
        path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
        return {**kept, "PATH": path, "MLFLOW_DISABLE_TELEMETRY": "true", **self.variables}

    def without_tracking(self) -> None:
        """Leave MLflow out, where it is not what the test is about: it costs seconds a command."""
        self.variables["LOCKSTEP_TRACKING"] = "off"

    @contextmanager
    def session(self, stages: str = OF_A_PIPELINE) -> Iterator[None]:
        """One process runs the stages, where it is their results that the test is about.

        A process for each has to import everything anew, which takes longer than a small stage.
        """
        self.run("lockstep", "session", "up", "--stages", stages)
        yield
        self.run("lockstep", "session", "down")

    def start(self, *words: str, **extra: str) -> subprocess.Popen[str]:
        """Start a command in the background, its output in one stream."""
        self.have_servers(words, extra)
        return subprocess.Popen(
            words,
            cwd=self.root,
            env={**self.environment, **extra},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def start_forked(self, *words: str, **extra: str) -> subprocess.Popen[str]:
        """The same, forked like what `run` runs; for tests in which its start has no part."""
        self.have_servers(words, extra, forked=True)
        return fork_command(words, self.root, {**self.environment, **extra}) or self.start(
            *words, **extra
        )

    def run(
        self, *words: str, check: bool = True, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; `check` fails the test with its output."""
        self.have_servers(words, extra, forked=True)
        environment = {**self.environment, **extra}
        done = run_forked(words, self.root, environment) or subprocess.run(
            words,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if check and done.returncode:
            pytest.fail(f"{' '.join(words)} exited {done.returncode}:\n{done.stdout}")
        return done

    def have_servers(
        self, words: Sequence[str], extra: Mapping[str, str], *, forked: bool = False
    ) -> None:
        """Before the first command that runs stages here: what they are forked from.

        A DVC that is itself forked drives its stages in forks of its own.
        """
        environment = {**self.environment, **extra}
        runs = words[0] in ("lockstep", "dvc") and {"run", "repro"} & set(words)
        name = environment.get("LOCKSTEP_PROFILE", "local")
        profile = self.root / f"slurm_profiles/{name}.yaml"
        here = "--profile" not in words and profile.is_file() and "local" in profile.read_text()
        if self.has_servers or not runs or is_switched_off(environment):
            return
        if forked and words[0] == "dvc" and not here:
            return
        self.has_servers = True
        fork_servers(self.root, environment, Resources() if here else None)

    def set_params(self, **changes: object) -> None:
        """Change params.yaml, by dotted key with `__` for the dot."""
        yaml = YAML()
        path = self.root / "params.yaml"
        params = yaml.load(path)
        for key, value in changes.items():
            *parents, last = key.split("__")
            section = params
            for parent in parents:
                section = section[parent]
            section[last] = value
        yaml.dump(params, path)

    def write_code(self, name: str, text: str) -> None:
        """Give a file of the stages other text, and have the code maps follow."""
        (self.root / name).write_text(text)
        write_maps(Repository(self.root), [stage.module for stage in STAGES.values()])
        self.has_servers = False  # the next command needs some with this code

    def commit(self, message: str = "change") -> None:
        self.run("git", "add", "-A")
        self.run("git", "commit", "-qm", message)

    def command_lines(self) -> dict[psutil.Process, list[str]]:
        """Every living process that works in this clone, and the words it was started with.

        Not those that only wait for somebody to need a process.
        """
        everything = self.with_servers()
        return {one: words for one, words in everything.items() if SERVER not in words}

    def with_servers(self) -> dict[psutil.Process, list[str]]:
        """Those as well."""
        found = {}
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                inside = any(str(self.root) in word for word in (process.cwd(), *words))
                lives = process.status() != psutil.STATUS_ZOMBIE
            except psutil.Error:
                continue
            if inside and lives:
                found[process] = words
        return found

    def processes(self) -> list[psutil.Process]:
        """Every living process that works in this clone."""
        return list(self.command_lines())

    def status(self, stage: str = "sft") -> dict[str, Any]:
        """The stage's row of `lockstep status --json`, without the second that a process takes.

        While its last job lives, the row is that job's: DVC need not say what is stale for it.
        """
        from pipelines.ledger.entry import Ledger
        from pipelines.runs import status
        from pipelines.slurm.scheduler import Scheduler

        with mock.patch.dict(os.environ, self.environment, clear=True):
            repository = Repository.find(self.root)
            Scheduler(repository).refresh()
            entry = Ledger(repository.jobs).latest(stage).get(stage)
            if entry and entry.state().alive:
                return status._of_entry(entry).as_json()
            rows = status.stage_statuses(repository)
        return next(row.as_json() for row in rows if row.stage == stage)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        said = lambda: f"; status: {self.run('lockstep', 'status').stdout}"  # noqa: E731
        return until(condition, what, otherwise=said, pause_s=0.2, at_work=self.is_at_work)

    def is_at_work(self) -> bool:
        """Whether anything can still change here."""
        return bool(self.processes())

    def until_state(self, state: str, stage: str = "sft") -> dict[str, Any]:
        def reached() -> dict[str, Any] | None:
            row = self.status(stage)
            return row if row["state"] == state else None

        return self.until(reached, f"{stage} {state}")

    def training(self, stage: str = "sft") -> dict[str, Any]:
        """Wait until the stage's job is in the middle of its steps."""

        def started() -> dict[str, Any] | None:
            if not list(self.root.glob(f".lockstep/jobs/{stage}/*/progress.json")):
                return None
            row = self.status(stage)
            return row if row["state"] == "running" and row["progress"] else None

        return self.until(started, f"{stage} in training")

    def start_sft(self) -> subprocess.Popen[str]:
        return self.start("dvc", "repro", "--single-item", "sft")

    def start_training(self, *command: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """The command that runs SFT, and the status of the stage in the middle of its steps.

        DVC is started as users start it; one of ours is forked.
        """
        start = self.start if command[:1] == ("dvc",) else self.start_forked
        driver = start(*command) if command else self.start_sft()
        return driver, self.training()

    def kill_all(self) -> None:
        kill_each(self.with_servers())
        self.has_servers = False


def kill_each(processes: Iterable[psutil.Process]) -> None:
    """Kill -9; one that has just ended by itself is as good."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


TINY = {
    "model__hidden_size": 32,
    "model__intermediate_size": 32,
    "model__num_layers": 1,
    "prepare__demonstrations": 48,
    "prepare__preferences": 48,
    "prepare__prompts": 32,
    "prepare__held_out": 16,
    "sft__epochs": 1,
    "reward_model__epochs": 1,
    "rollout__prompts": 8,
    "rollout__samples": 2,
    "policy_update__epochs": 1,
    "policy_update__batch_size": 8,
    "evaluate__samples": 1,
    "evaluate__pass_at": [1],
    "report__samples": 2,
    "rl__iterations": {"iter_001": {"policy": "sft"}},
}


def copy_tree(target: Path) -> Clone:
    """Every file that git tracks or would track, committed afresh."""
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "--archive", f"{_committed_tree()}/.", target], check=True)
    clone = Clone(target)
    # Git notes which file it has seen; the copies are others.
    clone.run("git", "update-index", "-q", "--refresh")
    return clone


@cache
def _committed_tree() -> Path:
    """What clones are copied from: made once in each test process."""
    folder = tempfile.TemporaryDirectory(prefix="lockstep-tree-")
    atexit.register(folder.cleanup)
    Path(folder.name).chmod(0o755)
    clone = Clone(Path(folder.name))
    copy_working_tree(clone.root)
    clone.run("git", "init", "-q", "-b", "main")
    clone.run("git", "config", "user.name", "Test")
    clone.run("git", "config", "user.email", "test@example.org")
    clone.commit("start")
    clone.run("git", "gc", "--quiet")
    # As after a first command: what is known of each file of the stages, by its bytes.
    with mock.patch.dict(code._known, clear=True):
        modules = [stage.module for stage in STAGES.values()]
        code.code_maps(clone.root, modules, Repository(clone.root).home)
    return clone.root


@pytest.fixture(scope="module", autouse=True)
def _alone_in_its_process() -> Iterator[None]:
    """What a worker that ran in this process has set does not reach the tests of other files."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.use_deterministic_algorithms(False)
        # By it accelerate, which TRL has, takes a process for one of several ranks.
        os.environ.pop("LOCAL_RANK", None)
        # vLLM's own ends with the process, which runs nothing but its tests.
        left = torch.distributed.is_initialized() and "vllm" not in sys.modules
        assert not left, "a process group was left behind"


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Clone]:
    """A fresh clone with the shipped params; whatever still runs there at the end is killed."""
    clone = copy_tree(tmp_path / "clone")
    yield clone
    clone.kill_all()


@pytest.fixture
def tiny_clone(clone: Clone) -> Clone:
    """A clone whose whole pipeline is small: it runs through, it does not learn."""
    clone.set_params(**TINY)
    clone.commit("tiny")
    return clone
