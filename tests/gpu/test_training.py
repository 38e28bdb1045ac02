"""Training on a GPU: packed rows against padded ones, the same bits twice, compiled and not."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.contracts.precision import Precision
from stages.data.batching import collate
from stages.engines.forward import packed
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.forward.packed import ForwardSettings, configure_forward
from stages.engines.training.learner import Optimization
from stages.engines.training.optimizer import Learner

pytestmark = pytest.mark.gpu
EAGER = ForwardSettings()
BOUND = 0.03
"""Of what bfloat16 says in two ways: largest difference of a log-prob, and share of the largest
gradient of a weight."""
SIZES = {
    "vocab_size": 5000,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "initializer_range": 0.04,
}
LENGTHS = ((3, 2), (1, 1), (20, 300), (7, 40), (5, 0), (9, 130))


def a_learner(precision=Precision.BFLOAT16):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).cuda()
    return Learner(model, Optimization(learning_rate=1e-3, max_grad_norm=1.0, precision=precision))


def a_batch():
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(2, 5000, (a + b,), generator=draw).tolist() for a, b in LENGTHS]
    return collate(
        [row[:a] for row, (a, _) in zip(rows, LENGTHS, strict=True)],
        [row[a:] for row, (a, _) in zip(rows, LENGTHS, strict=True)],
        0,
        "cuda",
    )


def learn(learner, *, padded=False, settings=EAGER):
    configure_forward(learner.model, settings)
    batch = a_batch()
    packed.hidden_states(learner.model, batch)
    assert packed._packable[learner.model]
    packed._packable[learner.model] = not padded
    said = response_logprobs(learner.model, batch, 1.0)
    said.logprobs.sum().backward()
    gradients = {name: p.grad.clone() for name, p in learner.named_parameters()}
    for parameter in learner.parameters():
        parameter.grad = None
    packed._packable[learner.model] = True
    return said.logprobs.detach(), gradients


def assert_close(one, two, bound):
    torch.testing.assert_close(one[0], two[0], rtol=0, atol=bound * float(two[0].abs().max()))
    for name, gradient in one[1].items():
        scale = float(two[1][name].abs().max())
        torch.testing.assert_close(gradient, two[1][name], rtol=0, atol=bound * scale)


def largest_gap(one, two):
    return float((one[0] - two[0]).abs().max())


@pytest.mark.parametrize("precision", list(Precision))
def test_packed_rows_say_what_padded_ones_say(precision, record_property):
    learner = a_learner(precision)
    bound = 1e-4 if precision is Precision.FLOAT32 else BOUND
    packed_ones, padded_ones = learn(learner), learn(learner, padded=True)
    record_property("largest_logprob_gap", largest_gap(packed_ones, padded_ones))
    assert_close(packed_ones, padded_ones, bound)


def test_the_same_bits_twice(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        one, two = learn(a_learner()), learn(a_learner())
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(one[0], two[0])
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])


def test_a_sequence_never_sees_its_neighbours():
    learner = a_learner()
    rows = [[5] * 70, list(range(2, 40)), [9, 9]]
    others = [[6] * 70, rows[1], [8, 9]]
    said = [
        response_logprobs(
            learner.model, collate([r[:1] for r in some], [r[1:] for r in some], 0, "cuda"), 1.0
        ).logprobs
        for some in (rows, others)
    ]
    assert torch.equal(said[0][1], said[1][1])


@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_layers_say_what_eager_ones_say(checkpointed, record_property):
    learner = a_learner()
    settings = ForwardSettings(compile=True, checkpoint_activations=checkpointed, micro_tokens=2048)
    compiled, eager = learn(learner, settings=settings), learn(learner)
    record_property("largest_logprob_gap", largest_gap(compiled, eager))
    assert_close(compiled, eager, BOUND)
