"""The Triton kernels against plain torch: on the CPU in Triton's interpreter, on a GPU compiled."""

import numpy
import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from transformers import Qwen3Config, Qwen3ForCausalLM
from triton.runtime import interpreter

from stages.engines.generation.decoding import decode
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.llama import kernels, torch_ops
from stages.engines.generation.llama.cuda_graphs import KernelDecoder
from stages.engines.generation.llama.decoder import LlamaDecoder
from stages.engines.generation.llama.slots import COUNT, LENGTH, REQUEST, TOKEN, Slots
from stages.engines.generation.llama.weights import Layer, Shape

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


def layer(dim, norms, dtype=torch.float32):
    empty = torch.empty(0)
    gains = [None, None]
    if norms:
        gains = [(1 + 0.1 * randn(dim, seed=seed)).to(dtype) for seed in (5, 6)]
    return Layer(empty, empty, None, *gains, empty, None, empty, empty, None, empty, None)


def product_of_bfloat16(_, a, b, total, *__):
    """Triton's interpreter multiplies the bits that it keeps bfloat16 in."""
    wide = [
        (x.data.astype(numpy.uint32) << 16).view(numpy.float32)
        if x.dtype.scalar == tl.bfloat16
        else x.data
        for x in (a, b)
    ]
    return interpreter.TensorHandle(numpy.matmul(*wide) + total.data, total.dtype.scalar)


@pytest.mark.parametrize(
    ("num_heads", "num_kv", "dim", "norms", "dtype"),
    [
        (9, 3, 64, False, torch.float32),
        (4, 4, 32, True, torch.float32),
        (4, 1, 48, True, torch.float32),
        (9, 3, 64, False, torch.bfloat16),
        (4, 1, 32, True, torch.bfloat16),
    ],
)
def test_attention(monkeypatch, num_heads, num_kv, dim, norms, dtype):
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product_of_bfloat16)
    shape = Shape(1, num_heads, num_kv, dim, 1e-6)
    lengths = [0, 1, 63, 64, 65, 150]
    state = torch.zeros(len(lengths), 5, dtype=torch.int64, device=DEVICE)
    state[:, LENGTH] = torch.tensor(lengths)
    qkv = randn(len(lengths), (num_heads + 2 * num_kv) * dim).to(dtype)
    angles = torch.arange(192)[:, None] * 0.3 ** torch.arange(dim // 2)
    cos, sin = (
        torch.cat([part, part], -1).to(DEVICE, dtype) for part in (angles.cos(), angles.sin())
    )
    caches = [randn(len(lengths), num_kv, 192, dim, seed=seed).to(dtype) for seed in (2, 3)]
    theirs = [cache.clone() for cache in caches]
    of = layer(dim, norms, dtype)
    expected = torch_ops.attention(state, shape, cos, sin)(qkv, of, *theirs)
    got = kernels.attention(state, shape, cos, sin)(qkv, of, *caches)
    bound = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got, expected, atol=bound, rtol=bound)
    for ours, reference in zip(caches, theirs, strict=True):
        torch.testing.assert_close(ours, reference, atol=bound, rtol=bound)


@pytest.mark.parametrize(
    ("num_heads", "num_kv", "dim", "norms"), [(9, 3, 64, False), (4, 2, 48, True)]
)
def test_prompts_enter_the_cache_of_all_slots_that_begin_with_them(num_heads, num_kv, dim, norms):
    shape = Shape(1, num_heads, num_kv, dim, 1e-6)
    qkv = randn(2, 18, (num_heads + 2 * num_kv) * dim)
    cos, sin = randn(32, dim, seed=7), randn(32, dim, seed=8)
    slots, prompt_of = (torch.tensor(ids, device=DEVICE) for ids in ([4, 0, 2], [0, 1, 1]))
    caches = [randn(6, num_kv, 32, dim, seed=seed) for seed in (2, 3)]
    theirs = [cache.clone() for cache in caches]
    of = layer(dim, norms)
    expected = torch_ops.prompts(shape, cos, sin, slots, prompt_of)(qkv, of, *theirs)
    got = kernels.prompts(shape, cos, sin, slots, prompt_of)(qkv, of, *caches)
    for ours, reference in zip([*got, *caches], [*expected, *theirs], strict=True):
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
        if step == 2:
            for board in boards:
                board.move({5: 3})
        reference.record(logits)
        kernels.draw_and_record(logits, ours)
        assert torch.equal(ours.state, reference.state)
        assert torch.equal(ours.tokens, reference.tokens)
        assert torch.equal(ours.counts, reference.counts)
        torch.testing.assert_close(ours.logprobs, reference.logprobs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.entropies, reference.entropies, atol=1e-4, rtol=1e-5)
    assert ours.state[2].tolist()[TOKEN : COUNT + 1] == [3, 3, 2]
    assert int(ours.state[2, REQUEST]) == ~1


def test_of_equally_likely_tokens_the_first_is_taken():
    board = Slots(1, 1, 4, DEVICE)
    board.begin([Request([1])], 4, Sampling(), ends=[2])
    board.admit({0: 0})
    logits, block = torch.zeros(1, 9001, device=DEVICE), kernels.BLOCK_VOCABULARY
    logits[0, [3 + 2 * block, 7 + 2 * block, 7 + block, 9 + block]] = 5.0
    kernels.draw_and_record(logits, board)
    assert int(board.state[0, TOKEN]) == 7 + block == int(logits.cpu().argmax())


def test_logits_that_are_not_numbers_show():
    board = Slots(2, 2, 4, DEVICE)
    board.begin([Request([1], seed=1), Request([1])], 4, Sampling(), ends=[2])
    board.admit({0: 0, 1: 1})
    logits = randn(2, 100)
    logits[:, 50] = torch.nan
    kernels.draw_and_record(logits, board)
    assert board.entropies.isnan().all()


@pytest.mark.parametrize("sampling", [Sampling(1.5), Sampling(1.5, top_k=7)])
def test_kernels_and_late_looks_give_the_answers_of_plain_torch(monkeypatch, sampling):
    # The interpreter's time goes by the size of blocks; several of each have to be there.
    for name, size in (("VOCABULARY", 16), ("TOKENS", 16), ("SWIGLU", 32)):
        monkeypatch.setattr(kernels, f"BLOCK_{name}", size)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        eos_token_id=[2, 3],
        initializer_range=0.3,
    )
    model = Qwen3ForCausalLM(config).to(DEVICE).eval()
    prompts = ([1, 5, 6], [1], [1, *range(4, 24)], [1, 4, 4, 4])
    requests = [Request(prompts[i % 4], seed=None if i == 4 else i) for i in range(8)]
    said = []
    for decoder in (LlamaDecoder(model, 5), KernelDecoder(model, 5)):
        with torch.inference_mode():
            decoder.begin(requests, 7, sampling)
            decode(decoder, requests, 7)
            said.append(decoder.completions())
    expected, ours = said
    assert {completion.finish_reason for completion in ours} == {"stop", "length"}
    for completion, other in zip(ours, expected, strict=True):
        assert completion.ids == other.ids
        assert completion.support == other.support
        assert completion.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert completion.entropy == pytest.approx(other.entropy, abs=1e-3)
