"""AdamW's moments on the host: the bits of a learner that keeps them beside its weights."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from stages.context import Context
from stages.contracts.precision import Precision
from stages.contracts.sharding import Offload
from stages.engines.processes.ranks import ALONE
from stages.engines.training import offload
from stages.engines.training.learner import Optimization
from stages.engines.training.learners import open_learner
from stages.engines.training.optimizer import Learner
from tests.stages.conftest import everything

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
LATE = "model.layers.1.mlp.down_proj.weight"
"""A weight that has no gradient in the first step."""


def a_learner(kept=Offload.NONE, device="cpu", precision=Precision.BFLOAT16, sizes=SIZES):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(device)
    how = Optimization(0.01, 1.0, weight_decay=0.1, ema_decay=0.5, precision=precision)
    return Learner(model, how, kept)


def take_steps(learner, steps):
    """Steps of other gradients each, and how large these were."""
    norms = []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for name, weight in learner.named_parameters():
            gradient = torch.randn(weight.shape, generator=draw).to(weight.device)
            weight.grad = None if name == LATE and step == 0 else gradient
        norms.append(learner.clip_gradients())
        learner.step(1.0 / (step + 1))
        assert all(weight.grad is None for weight in learner.parameters())
    return norms


def contents(learner):
    """All that it has learnt, and the weights that its model computes with."""
    computed = {name: weight.data for name, weight in learner.model.named_parameters()}
    return {**everything(learner), **computed}


def assert_same(one, two):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.cpu(), two[name].cpu()), name


@pytest.fixture(params=[2**32, 20_000, 1], ids=["one piece", "some pieces", "a piece each"])
def _pieces(request, monkeypatch):
    monkeypatch.setattr(offload, "PIECE_BYTES", request.param)


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("precision", list(Precision))
def test_moments_on_the_host_end_with_the_same_bits(precision):
    plain, offloaded = (a_learner(kept, precision=precision) for kept in list(Offload)[:2])
    for steps in ([0], [1, 2]):
        assert take_steps(plain, steps) == take_steps(offloaded, steps)
        assert_same(contents(plain), contents(offloaded))
        assert (f"moment.exp_avg.{LATE}" in offloaded.held()) is (steps != [0])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Offload.NONE, Offload.OPTIMIZER),
        (Offload.OPTIMIZER, Offload.NONE),
        (Offload.OPTIMIZER, Offload.OPTIMIZER),
    ],
)
def test_either_learner_goes_on_from_what_the_other_has_saved(first, second, tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "PIECE_BYTES", 20_000)
    begun, undisturbed = a_learner(first), a_learner()
    take_steps(begun, [0, 1])
    save_file(everything(begun), tmp_path / "state.safetensors")
    going_on = a_learner(second)
    going_on.load(load_file(tmp_path / "state.safetensors"))
    take_steps(going_on, [2, 3])
    take_steps(undisturbed, range(4))
    assert_same(contents(going_on), contents(undisturbed))


def test_the_profile_says_where_moments_are(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    ctx = Context(stage="t", key=None, seed=1, folder=tmp_path, offload=Offload.OPTIMIZER)
    learner = open_learner(ctx, ALONE, model, Optimization(0.01, 1.0))
    take_steps(learner, [0, 1])
    moments = [learner.whole(name) for name in learner.held() if name.startswith("moment.exp_avg")]
    assert len({moment.untyped_storage().data_ptr() for moment in moments}) == 1
