"""The Triton kernels against plain torch: on the CPU in Triton's interpreter, on a GPU compiled."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
pytest.importorskip("triton")

from stages.engines import kernels, torch_ops
from stages.engines.generator import Request, Sampling
from stages.engines.llama_family import Layer, Shape
from stages.engines.slots import COUNT, LENGTH, REQUEST, TOKEN, Slots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def randn(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("width", [64, 72])
def test_norm_and_swiglu(width):
    x, weight = randn(5, width), randn(width, seed=1)
    torch.testing.assert_close(
        kernels.rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5)
    )
    gate_up = randn(5, 2 * width) * 3
    torch.testing.assert_close(kernels.swiglu(gate_up), torch_ops.swiglu(gate_up))


def layer(dim, norms):
    empty = torch.empty(0)
    gains = [1 + 0.1 * randn(dim, seed=seed) for seed in (5, 6)] if norms else [None, None]
    return Layer(empty, empty, None, *gains, empty, None, empty, empty, None, empty, None)


@pytest.mark.parametrize(
    ("num_heads", "num_kv", "dim", "norms"), [(9, 3, 64, False), (4, 4, 32, True), (4, 1, 48, True)]
)
def test_attention(num_heads, num_kv, dim, norms):
    shape = Shape(1, num_heads, num_kv, dim, 1e-6)
    lengths = [0, 1, 63, 64, 65, 150]
    state = torch.zeros(len(lengths), 5, dtype=torch.int64, device=DEVICE)
    state[:, LENGTH] = torch.tensor(lengths)
    qkv = randn(len(lengths), (num_heads + 2 * num_kv) * dim)
    angles = torch.arange(192)[:, None] * 0.3 ** torch.arange(dim // 2)
    cos, sin = (
        torch.cat([part, part], -1).to(DEVICE).contiguous() for part in (angles.cos(), angles.sin())
    )
    caches = [randn(len(lengths), num_kv, 192, dim, seed=seed) for seed in (2, 3)]
    theirs = [cache.clone() for cache in caches]
    of = layer(dim, norms)
    expected = torch_ops.attention(state, shape, cos, sin)(qkv, of, *theirs)
    got = kernels.attention(state, shape, cos, sin)(qkv, of, *caches)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for ours, reference in zip(caches, theirs, strict=True):
        torch.testing.assert_close(ours, reference)


@pytest.mark.parametrize("vocabulary", [24, 4096, 9001])
def test_draws_and_what_is_noted_about_them(vocabulary):
    requests = [Request([1, 2], seed=i) for i in range(5)] + [Request([1, 2, 3])]
    boards = []
    for _ in range(2):
        board = Slots(8, len(requests), 4, DEVICE)
        board.begin(requests, 4, Sampling(0.7), ends=[2, 3])
        # A slot is free, and another has been.
        board.admit({0: 0, 1: 5, 2: 1, 4: 2, 5: 3, 6: 4})
        board.state[6, REQUEST] = ~4
        boards.append(board)
    ours, reference = boards
    for step in range(4):
        logits = 3 * randn(8, vocabulary, seed=10 + step)
        logits[2, 2:4] = torch.tensor([-100.0, 100.0 if step == 1 else -100.0])
        reference.record(logits)
        kernels.draw_and_record(logits, ours)
        assert torch.equal(ours.state, reference.state)
        assert torch.equal(ours.tokens, reference.tokens)
        assert torch.equal(ours.counts, reference.counts)
        torch.testing.assert_close(ours.logprobs, reference.logprobs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.entropies, reference.entropies, atol=1e-4, rtol=1e-5)
    assert ours.state[2].tolist()[TOKEN : COUNT + 1] == [3, 3, 2]
    assert int(ours.state[2, REQUEST]) == ~1


def test_logits_that_are_not_numbers_show():
    board = Slots(2, 2, 4, DEVICE)
    board.begin([Request([1], seed=1), Request([1])], 4, Sampling(), ends=[2])
    board.admit({0: 0, 1: 1})
    logits = randn(2, 100)
    logits[:, 50] = torch.nan
    kernels.draw_and_record(logits, board)
    assert board.entropies.isnan().all()
