"""Ranks that train a model spread over them each read their rows of a base, whatever its type.

What they end with is compared, byte by byte, with what they end with where each has loaded the base
whole. The ranks are those of test_spread.py.
"""

import json
import shutil

import pytest
import torch

from stages.engines.models.folders import load_policy, save_model
from tests.stages.conftest import Runner
from tests.stages.test_spread import HAS_DEEPSPEED, LORA, WORLD, run_jobs

ADAPTER = {**LORA, "save": "adapter"}
SHARDINGS = ["fsdp", *(["zero3"] if HAS_DEEPSPEED else [])]
FITS = {
    "all": {"untrained": True, "ema": 0.9},
    "lora": {"lora": ADAPTER, "precision": "bfloat16", "untrained": True},
    "on": {"lora": ADAPTER},
}
"""With all weights; with an adapter, computing in less; going on with one."""
STAGES = {
    "reward": ("reward_model", {"reward_model": {"batch_size": 32}}),
    "reward_lora": ("reward_model", {"lora": LORA, "reward_model": {"batch_size": 32}}),
}


def in_bfloat16(base, folder):
    """The base as most are published."""
    model = load_policy(base).bfloat16()
    save_model(model, folder, tokenizer_from=base)
    return folder


@pytest.fixture(scope="module")
def jobs(trained, tmp_path_factory):
    root = tmp_path_factory.mktemp("rows")
    base = in_bfloat16(trained.paths("sft")[0]["base"], root / "base")
    todo = []
    for sharding in SHARDINGS:
        for way in ("rows", "whole"):
            made = {"sharding": sharding, "world": WORLD, "loads_whole": way == "whole"}
            for name, how in FITS.items():
                start = root / f"lora-{sharding}-rows/model" if name == "on" else base
                folder = root / f"{name}-{sharding}-{way}"
                todo.append({**made, "folder": str(folder), "base": str(start), "fit": how})
            for name, (address, changes) in STAGES.items():
                folder = root / f"{name}-{sharding}-{way}"
                shutil.copytree(trained.root, folder)
                inputs, outs = Runner(folder, **changes).paths(address)
                for path in (inputs["base"], *outs.values()):
                    shutil.rmtree(path, ignore_errors=True)
                shutil.copytree(base, inputs["base"])
                todo.append({**made, "folder": str(folder), "address": address, "changes": changes})
    run_jobs(todo, root)
    return root


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("name", [*FITS, *STAGES])
def test_what_is_learnt_and_written_is_that_of_ranks_that_load_the_base_whole(jobs, name, sharding):
    by_rows, whole = (jobs / f"{name}-{sharding}-{way}" for way in ("rows", "whole"))
    assert (by_rows / "said-1").read_text().startswith("ShareDone")
    kept = ("artifacts", "metrics.json", "model", "untrained", "history.json", "moments*")
    names = [path.name for each in kept for path in whole.glob(each)]
    assert len(names) == 2 if name in STAGES else len(names) > 2
    for each in names:
        assert Runner.contents(by_rows / each) == Runner.contents(whole / each), each


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("name", FITS)
def test_a_rank_reads_its_part_of_the_base_and_nothing_else(jobs, name, sharding):
    """And has no more of the model in memory before its part."""
    whole = json.loads((jobs / f"{name}-{sharding}-whole/opened-0.json").read_text())
    names = sorted(load_policy(jobs / "base").state_dict())
    for rank in range(WORLD):
        opened = json.loads((jobs / f"{name}-{sharding}-rows/opened-{rank}.json").read_text())
        assert opened["in_memory"] == 4 * len(names) < whole["in_memory"] / 100
        read = [each for each in opened["read"] if "lora_" not in each[0]]
        assert sorted(tensor for tensor, _, _ in read) == names
        # Of ZeRO, a part may begin in the middle of a row.
        assert all(asked <= -(-rows // WORLD) + (sharding == "zero3") for _, rows, asked in read)


def test_the_base_of_these_tests_is_not_float32(jobs):
    from safetensors.torch import load_file

    tensors = load_file(jobs / "base/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
