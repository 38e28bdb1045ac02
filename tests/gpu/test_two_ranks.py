"""Two ranks that share the machine's GPU: they end where one process ends, but for rounding.

This module, run by its name, is one of the ranks.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from stages.context import Context, ShareDone
from stages.contracts.precision import Precision
from stages.contracts.sharding import Sharding
from stages.engines.processes.ranks import join
from stages.engines.training.learner import Optimization
from stages.engines.training.learners import open_learner
from stages.engines.training.loop import Plan, train
from stages.engines.training.schedules import warmup_then_cosine
from stages.learning.imitation import imitation
from tests.ports import free_port

pytestmark = pytest.mark.gpu
NAME = "tests.gpu.test_two_ranks"
WORLD, NUM_ROWS, TIMEOUT_S = 2, 11, 120
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
BOUNDS = {Precision.FLOAT32: 1e-3, Precision.BFLOAT16: 0.1}
"""Of the difference between what two ranks and what one process has learnt of a tensor, as a share
of the latter."""


def fit(folder, precision, **how):
    """SFT of a small model; the folder has what its weights have learnt, and how the ranks met."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(7)
    rows = [torch.randint(1, 512, (20 + 9 * i,), generator=draw).tolist() for i in range(NUM_ROWS)]
    folder.mkdir(parents=True, exist_ok=True)
    ctx = Context(stage="test", key=None, seed=3, folder=folder, device="cuda:0", **how)
    # A larger epsilon: with a small one rounding decides the signs of the first steps.
    optimization = Optimization(
        1e-3, 0.5, weight_decay=0.1, epsilon=1e-3, precision=Precision(precision)
    )
    with join(ctx) as ranks:
        if ctx.rank == 0:
            met = dist.get_backend() if ranks.world > 1 else "alone"
            (folder / "met").write_text(met)
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(ctx.loads_on)
        start = {n: weight.detach().cpu().clone() for n, weight in model.named_parameters()}
        learner = open_learner(ctx, ranks, model, optimization)
        work = imitation(model, [r[:5] for r in rows], [r[5:] for r in rows], ctx.device, str)
        plan = Plan(NUM_ROWS, 5, 2, seed=5, learning_rate=warmup_then_cosine(0.1))
        train(ctx, {"policy": learner}, plan, work, shown=["loss"], ranks=ranks)
        # As `online` gives them to the sampler.
        sampled = {name: weight.cpu().clone() for name, weight in learner.computed_weights()}
        whole = {name: learner.whole(f"weight.{name}") for name in start}
        if ctx.rank == 0:
            after = {name: weight.cpu() for name, weight in whole.items()}
            for name, weight in sampled.items():
                assert torch.equal(weight, after[name].to(weight.dtype)), name
            learnt = {name: after[name] - before for name, before in start.items()}
            save_file(learnt, folder / "learnt.safetensors")


def main(folder, precision, sharding, rank):
    signs = folder / "signs"
    signs.mkdir(parents=True, exist_ok=True)
    how = {"rank": rank, "world": WORLD, "heartbeats": signs, "collective_seconds": 30}
    try:
        fit(folder, precision, sharding=Sharding(sharding), micro_tokens=256, **how)
    except ShareDone:
        return


def fit_together(folder, precision, sharding):
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    try:
        for rank in range(WORLD):
            place = {"RANK": str(rank), "WORLD_SIZE": str(WORLD)}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", NAME, folder, precision, sharding, str(rank)],
                    cwd=Path(__file__).parents[2],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    encoding="utf-8",
                    env=os.environ | meeting | {**place, "LOCAL_RANK": str(rank)},
                )
            )
        said = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
        assert not any(rank.returncode for rank in ranks), "\n".join(said)[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    root = tmp_path_factory.mktemp("alone")
    for precision in Precision:
        fit(root / precision, precision, micro_tokens=256)
    return root


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.FSDP, Sharding.ZERO3])
def test_two_ranks_on_one_gpu_learn_what_one_process_learns(
    alone, tmp_path, sharding, precision, record_property
):
    fit_together(tmp_path, precision, sharding)
    assert (tmp_path / "met").read_text() == "gloo"
    one, two = (load_file(f / "learnt.safetensors") for f in (alone / precision, tmp_path))
    assert one.keys() == two.keys()
    gaps = {name: float((two[name] - one[name]).norm() / one[name].norm()) for name in one}
    record_property("largest_difference", max(gaps.values()))
    assert max(gaps.values()) <= BOUNDS[precision], max(gaps, key=gaps.get)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4]))
