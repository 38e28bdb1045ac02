"""One step of a learner, number by number."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer

from stages.context import Context
from stages.contracts.optimizer import OptimizerParams
from stages.contracts.policy_update import PolicyUpdateParams
from stages.contracts.precision import Precision
from stages.engines.processes.ranks import Ranks
from stages.engines.training.learner import Optimization
from stages.engines.training.loop import fresh_learner
from stages.engines.training.optimizer import Learner
from stages.learning.update import continued_learner
from tests.models.families import FAMILIES, SIZES
from tests.stages.conftest import everything

RATE, DECAY, BETAS, EPSILON = 0.01, 0.3, (0.8, 0.9), 1e-8
GRADIENTS = [[0.5, -2.0, 0.0], [0.25, 1.0, -3.0]]


MODELS = ("llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "phi", "gemma2", "opt", "olmo2")
"""Norms of several classes and names, with and without biases."""


class Two(torch.nn.Module):
    """Weights in two tensors, of two sizes."""

    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        self.two = torch.nn.Parameter(torch.tensor([4.0], dtype=torch.float64))


def learner(**options):
    how = {"learning_rate": RATE, "max_grad_norm": 1e9, "betas": BETAS, **options}
    return Learner(Two(), Optimization(**how))


def give(learner, gradients):
    one, two = learner.parameters()
    one.grad, two.grad = (torch.tensor(part, dtype=torch.float64) for part in gradients)


def numbers(learner):
    return [float(x) for parameter in learner.parameters() for x in parameter.detach()]


def test_weights_decay_apart_from_the_moments():
    """AdamW (Loshchilov and Hutter 2019): the decay never passes through the moments."""
    found = learner(weight_decay=DECAY)
    expected, means, squares = numbers(found), [0.0] * 3, [0.0] * 3
    for step, (gradients, factor) in enumerate(zip(GRADIENTS, (1.0, 0.5), strict=True), 1):
        give(found, (gradients[:2], gradients[2:]))
        found.step(factor)
        rate = RATE * factor
        for i, gradient in enumerate(gradients):
            means[i] = BETAS[0] * means[i] + (1 - BETAS[0]) * gradient
            squares[i] = BETAS[1] * squares[i] + (1 - BETAS[1]) * gradient**2
            mean = means[i] / (1 - BETAS[0] ** step)
            spread = math.sqrt(squares[i] / (1 - BETAS[1] ** step)) + EPSILON
            expected[i] -= rate * DECAY * expected[i] + rate * mean / spread
        assert numbers(found) == pytest.approx(expected, rel=1e-12)
    kept = [float(x) for name in ("one", "two") for x in found.whole(f"moment.exp_avg.{name}")]
    assert kept == pytest.approx(means, rel=1e-12)


def test_epsilon_is_added_to_the_root():
    """A first step is as long as the learning rate, but for epsilon."""
    found = learner(epsilon=0.5)
    before = numbers(found)
    give(found, ([0.5, -2.0], [0.0]))
    found.step(1.0)
    steps = [RATE * x / (abs(x) + 0.5) for x in (0.5, -2.0, 0.0)]
    expected = [x - step for x, step in zip(before, steps, strict=True)]
    assert numbers(found) == pytest.approx(expected, rel=1e-12)


def a_model(family, **changes):
    options = {**SIZES, "vocab_size": 20, **FAMILIES[family], **changes}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, num_labels=1, **options)
    return AutoModelForSequenceClassification.from_config(config)


def decayed(model, **options):
    """The names of what a step without gradients makes smaller."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    found = Learner(model, Optimization(RATE, 1e9, weight_decay=DECAY, **options))
    for parameter in found.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found.step(1.0)
    changed = {name: float(p.detach().max()) for name, p in model.named_parameters()}
    return {name for name, value in changed.items() if value < 1}


@pytest.mark.parametrize("family", MODELS)
def test_norms_and_biases_do_not_decay(family):
    """What decays is what transformers' Trainer, and so TRL, decays."""
    model = a_model(family)
    by_transformers = set(Trainer.get_decay_parameter_names(None, model))
    names = {name for name, _ in model.named_parameters()}
    assert decayed(model) == by_transformers & names
    assert any("norm" in name or "ln_" in name for name in names - by_transformers)
    assert "score.weight" in by_transformers


def test_norms_and_biases_decay_where_that_is_asked_for():
    model = a_model("phi")
    names = {name for name, _ in model.named_parameters()}
    assert decayed(model, decay_norms_and_biases=True) == names


def test_an_adapter_decays_and_what_is_frozen_does_not():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(a_model("phi"), LoraConfig(task_type="SEQ_CLS", bias="lora_only"))
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    spared = {name for name in learning if name.endswith(".bias")}
    assert spared
    assert decayed(model) == learning - spared


def test_moments_are_those_of_their_parameters_whatever_the_groups():
    """A checkpoint goes on with weight decay on and off, and with and without what it spares."""
    one, other = (a_model("phi") for _ in range(2))
    first = Learner(one, Optimization(RATE, 1e9))
    second = Learner(other, Optimization(RATE, 1e9, weight_decay=DECAY))
    for number, parameter in enumerate(first.parameters()):
        parameter.grad = torch.full_like(parameter, float(number))
    first.step(1.0)
    second.load(everything(first))
    assert second.held() == first.held()
    for name, tensor in everything(second).items():
        assert torch.equal(tensor, first.whole(name)), name


def test_a_gradient_of_zero_leaves_decay_alone():
    found = learner(weight_decay=DECAY)
    before = numbers(found)
    give(found, ([0.0, 0.0], [0.0]))
    found.step(1.0)
    assert numbers(found) == pytest.approx([x * (1 - RATE * DECAY) for x in before], rel=1e-12)


def test_what_params_say_reaches_the_optimizer(tmp_path):
    """Of the stages that train from the start to the end, and of those that go on."""
    how = {
        "learning_rate": 0.02,
        "weight_decay": 0.3,
        "decay_norms_and_biases": True,
        "beta1": 0.5,
        "beta2": 0.6,
        "adam_epsilon": 0.1,
        "max_grad_norm": 7.0,
    }
    ctx = Context(stage="test", key=None, seed=3, folder=tmp_path)
    params = OptimizerParams(epochs=1, batch_size=1, **how)
    fresh = fresh_learner(ctx, Ranks(), Two(), params, Precision.FLOAT32)
    config = SimpleNamespace(policy_update=PolicyUpdateParams(**how), precision=Precision.FLOAT32)
    state = SimpleNamespace(of=lambda _: {})
    going_on = continued_learner(ctx, Ranks(), Two(), "policy", 0.02, config, state)
    assert (
        fresh.how
        == going_on.how
        == Optimization(
            learning_rate=0.02,
            max_grad_norm=7.0,
            weight_decay=0.3,
            decay_norms_and_biases=True,
            betas=(0.5, 0.6),
            epsilon=0.1,
        )
    )


@pytest.mark.parametrize(("most", "scale"), [(1.0, 1 / 13), (13.5, 1.0)])
def test_the_norm_that_is_clipped_is_of_all_weights_together(most, scale):
    found = learner(max_grad_norm=most)
    give(found, ([3.0, -4.0], [12.0]))
    assert found.clip_gradients() == pytest.approx(13.0)
    clipped = [float(x) for parameter in found.parameters() for x in parameter.grad]
    assert clipped == pytest.approx([3 * scale, -4 * scale, 12 * scale], rel=1e-5)
