"""Learners for many ranks on a GPU, by NCCL: one rank, which is as many as NCCL takes on one GPU.

It does all that several would: weights are gathered for a pass, gradients added up by the backward
pass, moments kept aside. What it ends with is what an ordinary learner ends with.
"""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from stages.context import Context
from stages.contracts.precision import Precision
from stages.contracts.sharding import Offload, Sharding
from stages.engines.processes.ranks import ALONE
from stages.engines.training.learner import Optimization
from stages.engines.training.learners import open_learner
from stages.engines.training.loop import Plan, train
from stages.engines.training.schedules import warmup_then_cosine
from stages.learning.imitation import imitation
from stages.selftest.tiny import SIZES, make_rows

pytestmark = pytest.mark.gpu
NUM_ROWS = 24
BOUND = {Precision.FLOAT32: 1e-3, Precision.BFLOAT16: 0.1}
"""How far two weights may be apart, as a share of how far training has moved any."""
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
WAYS = [
    pytest.param(sharding, offload, id=f"{sharding}-{offload}", marks=marks)
    for sharding, marks in (
        (Sharding.FSDP, ()),
        *((Sharding(f"zero{stage}"), NEEDS_DEEPSPEED) for stage in (1, 2, 3)),
    )
    for offload in (Offload.NONE, Offload.OPTIMIZER)
]


@pytest.fixture
def _no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def trained(folder, precision, **how):
    """The weights that learn, before and after some steps, and the losses."""
    ctx = Context(stage="test", key=None, seed=1, folder=folder, device="cuda:0", **how)
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(ctx.loads_on)
    before = {name: weight.detach().cpu().clone() for name, weight in model.named_parameters()}
    # A larger epsilon: with a small one rounding decides the signs of the first steps.
    settings = Optimization(1e-3, 1.0, weight_decay=0.1, epsilon=1e-3, precision=precision)
    learner = open_learner(ctx, ALONE, model, settings)
    work = imitation(model, *make_rows(NUM_ROWS), ctx.device, lambda row: f"row {row}")
    plan = Plan(NUM_ROWS, 8, 2, seed=5, learning_rate=warmup_then_cosine(0.1))
    history = train(ctx, {"policy": learner}, plan, work, shown=["loss"], ranks=ALONE)
    after = {name: learner.whole(f"weight.{name}") for name in before}
    return before, after, [step["loss"] for step in history]


@pytest.mark.usefixtures("_no_group_is_left")
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(("sharding", "offload"), WAYS)
def test_ends_with_what_an_ordinary_learner_ends_with(sharding, offload, precision, tmp_path):
    before, plain, plain_losses = trained(tmp_path / "plain", precision)
    how = {"sharding": sharding, "offload": offload}
    _, spread, losses = trained(tmp_path / "spread", precision, **how)
    assert dist.get_backend() == "nccl"
    assert losses == pytest.approx(plain_losses, rel=1e-2 if "16" in precision else 1e-5)
    moved = max(float((plain[name].cpu() - before[name]).abs().max()) for name in before)
    assert moved > 1e-4
    for name, weight in plain.items():
        apart = float((spread[name].cpu() - weight.cpu()).abs().max())
        assert apart <= BOUND[precision] * moved, name
