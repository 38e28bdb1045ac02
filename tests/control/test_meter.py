"""What a process notes of itself while it runs, for what it costs: cheap, and never in its way."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pipelines.base import nvml
from pipelines.base.nvml import GpuReading, gpu_reader, named_gpus
from pipelines.config.profiles import Resources
from pipelines.ledger.entry import Attempt, Entry
from pipelines.ledger.state import State
from pipelines.ledger.task import Task
from pipelines.ledger.usage import Usage, usages_of
from pipelines.worker import meter
from pipelines.worker.meter import Meter, metered
from tests.ledger_values import LOCAL, SLURM, launch
from tests.waiting import TIMEOUT_S, until

MIB = 1 << 20
LIBRARY = """
#include <string.h>
static int gpus[3] = {10, 50, 90};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
  *device = &gpus[index]; return index > 2;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  *device = &gpus[2]; return strcmp(uuid, "MIG-7") != 0;
}
int nvmlDeviceGetUtilizationRates(void *device, struct { unsigned int gpu, memory; } *busy) {
  busy->gpu = *(int *)device; return device == &gpus[2] ? 3 : 0;
}
int nvmlDeviceGetMemoryInfo(void *device, struct { unsigned long long total, free, used; } *m) {
  m->total = 1000; m->free = 1; m->used = 5000000000ULL + *(int *)device; return 0;
}
"""


@pytest.fixture
def attempt(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    monkeypatch.setattr(meter, "FIRST_S", 0.01)
    monkeypatch.setattr(meter, "LONGEST_S", 0.01)
    monkeypatch.setattr(meter, "LAST_S", TIMEOUT_S)
    return entry.new_attempt(launch(LOCAL))


@contextmanager
def running(attempt: Attempt, task: Task | None = None) -> Iterator[Meter]:
    with metered(attempt, task or Task(), attempt.launched) as its:
        yield its


def noted(attempt: Attempt) -> Usage:
    (usage,) = usages_of(attempt)
    return usage


def test_a_process_notes_its_length_its_stage_its_memory_and_its_end(attempt: Attempt) -> None:
    with running(attempt) as its:
        until(lambda: usages_of(attempt), "a first reading")
        before = noted(attempt)
        assert (before.state, before.start_up, before.saved) == (None, None, None)
        its.stage_begins()
        child = subprocess.Popen(
            [sys.executable, "-c", f"a = b'x' * {200 * MIB}; print(1, flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout
        assert child.stdout.readline()
        own = psutil.Process().memory_info().rss
        until(lambda: noted(attempt).memory_peak > own + 150 * MIB, "the child's memory")
        child.communicate(b"\n")
        its.end(State.COMPLETED)
    after = noted(attempt)
    assert after.state is State.COMPLETED
    assert after.start_up is not None
    assert 0 < after.start_up < after.seconds
    assert after.memory_peak > own + 150 * MIB, "the most that was seen"
    assert (after.gpu_readings, after.gpu_busy, after.gpu_memory_peak) == (0, None, None)


def test_that_it_has_begun_is_noted_before_any_reading(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "FIRST_S", 3600.0)
    with running(attempt):
        until(lambda: usages_of(attempt), "a first note")
        assert (noted(attempt).memory_peak, noted(attempt).state) == (0, None)
    assert noted(attempt).memory_peak


@pytest.mark.parametrize("name", ["checkpoint-00000001", "steps/2/parts/pass/0-4.json"])
def test_what_is_saved_into_the_scratch_is_seen_once_it_is_whole(
    attempt: Attempt, name: str
) -> None:
    path = attempt.entry.folder / "scratch" / name
    path.parent.mkdir(parents=True)
    (path.parent.parent / "other").mkdir(exist_ok=True)
    with running(attempt):
        until(lambda: usages_of(attempt), "a first reading")
        if "parts" not in name:
            (path.parent / f".{path.name}.tmp").mkdir()
        seen = noted(attempt).seconds
        until(lambda: noted(attempt).seconds > seen, "another reading")
        assert noted(attempt).saved is None
        path.write_text("whole")
        until(lambda: noted(attempt).saved, "what was saved")
    assert 0 < (noted(attempt).saved or 0) <= noted(attempt).seconds


def test_a_process_that_is_killed_has_said_how_long_it_ran(attempt: Attempt) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from pipelines.ledger.entry import Attempt; from pipelines.ledger.task import Task\n"
        "from pipelines.worker import meter\n"
        "meter.FIRST_S = meter.LONGEST_S = 0.01\n"
        "attempt = Attempt(Path(sys.argv[1]))\n"
        "with meter.metered(attempt, Task(), attempt.launched): time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(attempt.folder)])
    try:
        until(lambda: (seen := usages_of(attempt)) and seen[0].seconds > 0.2, "some readings")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    usage = noted(attempt)
    assert usage.state is None
    assert usage.seconds > 0.2
    assert usage.begun + usage.seconds < time.time() + 1


def test_a_disk_without_room_is_the_stages_matter_alone(attempt: Attempt) -> None:
    (attempt.folder / "usage").write_text("no folder can be made here")
    with running(attempt) as its:
        time.sleep(0.05)
        its.end(State.COMPLETED)
    assert usages_of(attempt) == []


def test_the_time_before_the_worker_counts_where_slurm_tells_of_it(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_START_TIME", str(int(time.time()) - 300))
    with running(attempt, Task(job="7")):
        pass
    usage = noted(attempt)
    assert usage.seconds >= 299
    assert usage.begun + usage.seconds < time.time() + 1


def test_gpus_are_those_that_cuda_would_use() -> None:
    assert named_gpus(None, 2) == [0, 1]
    assert named_gpus("3, 1", 4) == [3, 1]
    assert named_gpus("GPU-1234,0", 4) == ["GPU-1234", 0]
    assert named_gpus("1,7,0", 4) == [1], "CUDA sees none after a wrong one"
    assert named_gpus("", 4) == []


def test_gpus_are_read_from_the_library_of_the_driver(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is built here stands in for it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, library = tmp_path / "nvml.c", tmp_path / "nvml.so"
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-w", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setattr(nvml, "_LIBRARY", str(library))
    full = 5_000_000_000
    assert gpu_reader("1,0", 0, 2)() == [
        GpuReading(50.0, full + 50),
        GpuReading(10.0, full + 10),
    ]
    assert gpu_reader("0,1", 1, 1)() == [GpuReading(50.0, full + 50)]
    assert gpu_reader("MIG-7", 0, 1)() == [GpuReading(None, full + 90)]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    attempt.write(launch(SLURM, resources=Resources(gpus_per_node=2)))
    for rank in range(2):
        with running(attempt, Task(job="7", rank=rank, world=2, local_rank=rank)):
            pass
    first, second = usages_of(attempt)
    assert (first.gpu_busy, first.gpu_memory_peak) == (30.0, full + 50)
    assert second.gpu_readings == 0, "one process reads for its node"


def test_without_a_driver_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_LIBRARY", "libnothing-of-that-name.so")
    assert gpu_reader(None, 0, 8)() == []
