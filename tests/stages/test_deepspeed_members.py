"""Undocumented members of DeepSpeed: every job of ZeRO checks that those it uses are there."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.context import Context, StageError
from stages.engines.processes import deepspeed_engine
from stages.engines.processes.deepspeed_members import MEMBERS, check_members, check_version

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / "stages/engines"


@pytest.mark.parametrize("version", ["0.19.8", "0.19.9", "0.19.8+1a2b3c"])
def test_versions_that_were_tested_are_taken(version):
    check_version(version)


@pytest.mark.parametrize("version", ["0.19.7", "0.20.0", "1.0"])
def test_another_version_is_refused_with_what_to_do(version):
    expected = rf"DeepSpeed {re.escape(version)} is installed.*sharding to fsdp"
    with pytest.raises(StageError, match=expected):
        check_version(version)


def test_the_pinned_version_is_one_that_was_tested():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [pinned] = extras["optional-dependencies"]["deepspeed"]
    check_version(pinned.removeprefix("deepspeed=="))


def test_a_member_that_is_gone_is_named():
    whole = SimpleNamespace(**dict.fromkeys(MEMBERS["parameter of zero3"]))
    check_members("0.19.8", {"parameter of zero3": whole})
    del whole.ds_persist
    with pytest.raises(StageError, match=r"0\.19\.8 .* parameter of zero3 has no ds_persist.*fsdp"):
        check_members("0.19.8", {"parameter of zero3": whole})


def test_nothing_is_used_that_is_not_in_the_table():
    text = (ENGINES / "training/zero.py").read_text()
    text += (ENGINES / "processes/deepspeed_engine.py").read_text()
    used = re.findall(
        r"(?:self\._zero|self\._engine|offload|groups|comm|deepspeed\.ops)\.(\w+)", text
    )
    used += re.findall(r"parameter\.(_hp_mapping|ds_\w+|all_gather|partition)", text)
    documented = {"destroy", "init_distributed", "parameter_offload"}
    known = {member for members in MEMBERS.values() for member in members}
    assert set(used) - documented <= known
    for member in known:
        assert re.search(rf"\b{member}\b", text), f"{member} is not used any more"


@pytest.mark.parametrize(("device", "gpu"), [("cuda:2", "2"), ("cuda", "0"), ("cpu", "0")])
def test_deepspeed_takes_the_gpu_of_the_rank(tmp_path, monkeypatch, device, gpu):
    # As the fourth process of a node that has three GPUs, or one.
    monkeypatch.setattr(os, "environ", {**os.environ, "LOCAL_RANK": "3"})
    monkeypatch.setattr(deepspeed_engine, "connect_alone", lambda _: None)
    monkeypatch.setattr("deepspeed.comm.init_distributed", lambda **_: None)
    deepspeed_engine.connect(Context("test", None, 0, tmp_path, device=device))
    assert os.environ["LOCAL_RANK"] == gpu


ALONE = """
import sys
from pathlib import Path
from stages.context import Context
from stages.engines.processes.deepspeed_engine import connect
assert "deepspeed" not in sys.modules
connect(Context("test", None, 0, Path(sys.argv[1]), device="cpu"))
import deepspeed, torch.distributed
assert deepspeed.comm.get_world_size() == torch.distributed.get_world_size() == 1
assert not any(name.split(".")[0] == "mlflow" for name in sys.modules)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_it_is_imported_once_a_job_needs_it_and_without_its_tuner(tmp_path):
    """In a fresh interpreter: ranks of other tests are forked from one that has imported it."""
    pytest.importorskip("deepspeed")
    variables = {name: text for name, text in os.environ.items() if name != "DS_ACCELERATOR"}
    subprocess.run([sys.executable, "-c", ALONE, tmp_path], check=True, env=variables, cwd=ROOT)
