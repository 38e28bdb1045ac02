"""Disks that fill up or fail, clocks that are set back, two commands at once: clear words, no harm.

The faults come from a small library that is compiled here and loaded before the C library's calls;
which call fails and when is drawn from the seed that is printed.
"""

import inspect
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import copy_of, copy_to_torment
from tests.chaos.drill import PARTS, REPEATS, STEPS, compute
from tests.chaos.monkey import results, the_seed, wait_for_quiet
from tests.waiting import ended, succeeded, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
SFT = "artifacts/policies/sft/model"
DAY_S = 86400
LIGHT_STAGE = f"""
import time
from pathlib import Path
from typing import Any

STEPS, PARTS, REPEATS = {STEPS}, {PARTS}, {REPEATS}


{inspect.getsource(compute)}

def run(*given):
    time.sleep(2)
    return compute(*given)
"""
"""It writes as stages do, and has nothing to import that takes longer than that."""


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library that makes calls fail."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler, so no call of the C library can be made to fail")
    target = tmp_path_factory.mktemp("faults") / "faults.so"
    source = HERE / "faults.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", target, source, "-ldl"], check=True)
    return str(target)


@pytest.fixture
def prepared(prepared_root: Path, tmp_path: Path) -> Iterator[Any]:
    """A clone in which only `prepare` has run."""
    with copy_to_torment(prepared_root, tmp_path / "clone") as clone:
        clone.without_tracking()
        yield clone


@pytest.fixture(scope="session")
def light_root(fresh_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with light stages, in which `prepare` has run; beside it one with `sft`, too."""
    folder = tmp_path_factory.mktemp("light")
    with copy_to_torment(fresh_root, folder / "clone") as clone:
        clone.without_tracking()
        for name in ("prepare", "sft"):
            clone.write_code(f"stages/{name}.py", LIGHT_STAGE)
        clone.commit("light")
        # A warm process would have to import the code of this clone anew.
        cold = {"LOCKSTEP_TRACKING": "off", "LOCKSTEP_WARM": "off"}
        clone.run("lockstep", "run", "prepare", **cold)
        peaceful = copy_of(clone.root, folder / "peaceful")
        peaceful.run("lockstep", "run", "sft", **cold)
        root: Path = clone.root
        return root


@pytest.fixture
def light(light_root: Path, tmp_path: Path) -> Iterator[Any]:
    """A copy of it to torment."""
    with copy_to_torment(light_root, tmp_path / "clone") as clone:
        clone.without_tracking()
        yield clone


@pytest.mark.parametrize(("what", "cases"), [("stage", 80), ("checkpoints", 80)])
def test_after_any_fault_nothing_half_written_passes_for_whole(
    tmp_path: Path, faults: str, what: str, cases: int
) -> None:
    seed = the_seed()
    words = [sys.executable, HERE / "drill.py", what, tmp_path, str(seed), str(cases)]
    environment = {**os.environ, "LD_PRELOAD": faults, "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    *problems, end = done.stdout.splitlines() or [done.stderr]
    assert done.returncode == 0, done.stderr
    assert problems == []
    assert int(end.split()[0]) > cases / 5, "hardly any fault came to anything"


@pytest.mark.parametrize("who", ["pipelines stage", "submitit", "-m dvc"])
def test_a_failing_disk_is_named_and_the_same_command_then_ends_with_the_same_bytes(
    light: Any, light_root: Path, faults: str, who: str
) -> None:
    """A fault in the driver, in the worker or in dvc itself, in a run of a whole stage."""
    seed = the_seed()
    draw = random.Random(f"{seed} {who}")
    told = light.root.parent / "told"
    # The faults begin with a process: each has to be a fresh one.
    light.variables["LOCKSTEP_WARM"] = "off"
    for _ in range(2):
        light.kill_all()
        until(lambda: not light.with_servers(), "nobody writes what is removed")
        for made_before in ("artifacts", "metrics", ".lockstep", ".dvc/cache", ".dvc/tmp"):
            shutil.rmtree(light.root / made_before)
        (light.root / "dvc.lock").unlink()
        call, number = draw.choice(["write", "rename", "open", "fsync"]), draw.choice([28, 5])
        folder = light.root if who == "-m dvc" else light.root / draw.choice([".lockstep", ""])
        first, times = draw.randrange(1, 12), draw.choice([0, 1])
        fault = {
            "LD_PRELOAD": faults,
            "CHAOS_WHO": who,
            "CHAOS_FAULT": f"{call} {number} {first} {times} {folder}",
            "CHAOS_TOLD": str(told),
        }
        story = f"LOCKSTEP_CHAOS_SEED={seed}: {fault}"
        told.unlink(missing_ok=True)
        done = light.run("lockstep", "run", "prepare", check=False, **fault)
        if done.returncode:
            assert told.exists(), f"{story}\n{done.stdout}"
            if who != "-m dvc":
                assert os.strerror(number) in done.stdout, f"{story}\n{done.stdout}"
                assert "\nTraceback" not in done.stdout, f"{story}\n{done.stdout}"
        done = light.run("lockstep", "run", "prepare", check=False)
        assert done.returncode == 0, f"{story}\n{told.read_text()}\n{done.stdout}"
        made, wanted = results(light.root), results(peaceful(light_root))
        del made["dvc.lock"]
        assert made
        assert made == {path: wanted[path] for path in made}, story


def test_a_read_only_artifact_folder_is_named_and_costs_no_computation(light: Any) -> None:
    private = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    if light.run(*private, "mount -t tmpfs none /mnt", check=False).returncode:
        pytest.skip("a read-only folder needs a mount namespace, which this system does not allow")
    policies = "artifacts/policies"
    (light.root / policies).mkdir(parents=True, exist_ok=True)
    bind = f"mount --bind {policies} {policies} && mount -o remount,ro,bind {policies}"
    command = "python -m pipelines stage sft"
    done = light.run(*private, f"{bind} && exec {command}", check=False, LOCKSTEP_WARM="off")
    assert done.returncode != 0
    assert "Read-only file system" in done.stdout
    assert policies in done.stdout
    assert "Traceback" not in done.stdout
    assert "found finished; publishing" in light.run("dvc", "repro", "--single-item", "sft").stdout


def test_a_clock_that_is_set_back_changes_nothing(
    prepared: Any, peaceful_root: Path, faults: str
) -> None:
    """Back by a day while a job runs, and files from that tomorrow lie about ever after."""
    clock = prepared.root.parent / "clock"
    clock.write_text("0")
    wrong = {"LD_PRELOAD": faults, "CHAOS_CLOCK": str(clock)}
    process = prepared.start("lockstep", "run", "sft", **wrong)
    jobs = prepared.root / ".lockstep/jobs/sft"
    while process.poll() is None and not list(jobs.glob("*/attempts/*/worker.json")):
        time.sleep(0.02)
    clock.write_text(str(-DAY_S))
    output = succeeded(process)
    assert "unchanged or restored" not in output
    # A stage that was computed before it was set back, asked for again with another setting.
    prepared.set_params(sft__epochs=2)
    clock.write_text(str(-2 * DAY_S))
    prepared.run("lockstep", "run", "sft", **wrong)
    rows = json.loads(prepared.run("lockstep", "status", "--json", **wrong).stdout)["stages"]
    row = next(row for row in rows if row["stage"] == "sft")
    assert (row["state"], row["attempts"]) == ("up to date", 1)
    prepared.set_params(sft__epochs=epochs(peaceful_root))
    prepared.run("lockstep", "run", "sft", **wrong)
    assert_sft_is_that_of(prepared, peaceful_root)
    assert len(list(jobs.glob("*/attempts/*"))) == 2, "going back restores"


COMMANDS = {
    "run": ("lockstep", "run", "sft"),
    "dvc": ("dvc", "repro", "--single-item", "sft"),
    "stage": ("python", "-m", "pipelines", "stage", "sft"),
}


@pytest.mark.parametrize(
    ("one", "other"), [("run", "run"), ("dvc", "dvc"), ("run", "dvc"), ("stage", "stage")]
)
def test_of_two_commands_at_once_one_computes(
    light: Any, light_root: Path, one: str, other: str
) -> None:
    both = [light.start(*COMMANDS[name]) for name in (one, other)]
    ends = [(ended(process), process.returncode) for process in both]
    story = "\n--- the other ---\n".join(f"{code}\n{output}" for output, code in ends)
    assert 0 in [code for _, code in ends], story
    for output, code in ends:
        if code:
            refusals = (
                "another pipeline runs",
                "already waiting for this job",
                "is busy",
                "a stage is running",
                "Unable to acquire lock",  # DVC's own, which waits for 3 s alone
            )
            assert any(words in output for words in refusals), story
            assert "Traceback" not in output, story
    assert len(list(light.root.glob(".lockstep/jobs/sft/*/attempts/*"))) == 1, story
    light.run("dvc", "repro", "--single-item", "sft")
    assert len(list(light.root.glob(".lockstep/jobs/sft/*/attempts/*"))) == 1, story
    assert_sft_is_that_of(light, peaceful(light_root))
    assert wait_for_quiet(light) == []


def peaceful(light_root: Path) -> Path:
    """Where `prepare` and `sft` have run, and nobody has disturbed them."""
    return light_root.with_name("peaceful")


def epochs(root: Path) -> int:
    from ruamel.yaml import YAML

    return int(YAML(typ="safe").load((root / "params.yaml").read_text())["sft"]["epochs"])


def assert_sft_is_that_of(clone: Any, peaceful_root: Path) -> None:
    made, wanted = results(clone.root), results(peaceful_root)
    of_sft = [path for path in wanted if path.startswith((SFT, "metrics/sft"))]
    assert of_sft
    assert {path: made.get(path) for path in of_sft} == {path: wanted[path] for path in of_sft}
