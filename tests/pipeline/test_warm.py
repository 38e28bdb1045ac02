"""Stages in forked processes: which ones are, and that nothing but time depends on it.

That both ways make the same bytes with the model that ships is in test_default_pipeline.py; that a
kill of any process at any moment costs nothing is in tests/chaos.
"""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import SERVER, kill_each
from tests.waiting import until

pytestmark = pytest.mark.slow

IMPORTED = """
import os, sys
import pipelines.warm.server as server
from pipelines.warm.child import _reseed
server.preload(server.Kind.COMPUTE)
torch, numpy = sys.modules["torch"], sys.modules["numpy"]
assert "stages.policy_update" in sys.modules
assert not torch.cuda.is_initialized()
assert server.threads_at_a_fork() == []
for _ in range(2):
    if not os.fork():
        _reseed()
        print("drawn", torch.rand(()).item(), numpy.random.rand(), flush=True)
        os._exit(0)
    os.wait()
"""


def servers(clone: Any) -> list[psutil.Process]:
    return [process for process, words in clone.with_servers().items() if SERVER in words]


def logs_of(clone: Any, stage: str) -> list[str]:
    return sorted(
        path.name for path in clone.root.glob(f".lockstep/jobs/{stage}/*/attempts/*/*_log.out")
    )


def test_the_switch_and_the_debug_profile_do_without(finished: Any) -> None:
    finished.without_tracking()
    lock = (finished.root / "dvc.lock").read_bytes()
    finished.run("dvc", "repro", "--single-item", "--force", "sft", LOCKSTEP_WARM="off")
    assert not servers(finished)
    cold = logs_of(finished, "sft")
    assert not [name for name in cold if name.startswith("job_")]
    finished.run("lockstep", "stage", "report", "--profile", "debug")
    assert not servers(finished)
    finished.run("dvc", "repro", "--single-item", "--force", "sft")
    assert servers(finished)
    assert [name for name in logs_of(finished, "sft") if name.startswith("job_")]
    bill = json.loads(finished.run("lockstep", "cost", "--stage", "sft", "--json").stdout)
    noted = (bill["total"]["attempts"], bill["total"]["estimated"])
    assert noted == (3, 0), "in a session, in a process of its own, in a forked one"
    assert (finished.root / "dvc.lock").read_bytes() == lock


def test_down_ends_the_servers_and_killed_ones_are_replaced(finished: Any) -> None:
    finished.without_tracking()
    stage = ("lockstep", "run", "rollout@iter_001")
    for seed, killed in ((3, False), (4, True), (5, False)):
        finished.set_params(rollout__temperature=1.0 + seed / 10)
        output = finished.run(*stage).stdout
        assert "rollout@iter_001: entropy" in output
        if killed:
            kill_each(servers(finished))
    assert len(servers(finished)) == 2, "one of each kind"
    said = finished.run("lockstep", "down").stdout
    assert "stopped 2 processes that were ready for stages" in said
    until(lambda: not servers(finished), "they end")


def test_what_a_server_imports_starts_no_thread_and_touches_no_gpu_and_each_child_draws_anew(
    finished: Any,
) -> None:
    code = next(path for path in (finished.root / ".lockstep/code").iterdir())
    environment = {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
    said = finished.run("python", "-c", IMPORTED, **environment).stdout
    drawn = [line.split()[1:] for line in said.splitlines() if line.startswith("drawn")]
    assert len(drawn) == 2
    assert not set(drawn[0]) & set(drawn[1])


def test_code_that_changes_is_run_by_the_next_stage(finished: Any) -> None:
    finished.without_tracking()
    finished.run("dvc", "repro", "--single-item", "--force", "sft")
    source = (finished.root / "stages/sft.py").read_text()
    finished.write_code("stages/sft.py", source + '\nprint("the new code")\n')
    finished.run("dvc", "repro", "--single-item", "sft")
    newest = max(
        finished.root.glob(".lockstep/jobs/sft/*/attempts/*/job_0_log.out"),
        key=lambda path: path.stat().st_mtime,
    )
    code = json.loads((newest.parent / "launch.json").read_text())["code"]
    assert '"the new code"' in (Path(code) / "stages/sft.py").read_text()
    said = [path.read_text() for path in finished.root.glob(".lockstep/warm/compute-*/log")]
    assert [log for log in said if "the new code" in log]
