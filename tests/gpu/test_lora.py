"""Adapters that are merged on a GPU: to the bits of the CPU."""

import pytest
import torch

from stages.contracts.precision import Precision
from stages.engines.models.lora import with_adapter
from tests.stages.test_lora import assert_sampled_as_loaded, merged_by_hand, write_base

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 16, 300])
def test_a_gpu_merges_to_the_bits_of_the_cpu(rank, transposed):
    torch.manual_seed(rank)
    before, a, b = torch.randn(700, 900), torch.randn(rank, 900), torch.randn(700, rank)
    stored = before.T.contiguous() if transposed else before
    merged = with_adapter(stored, a.cuda(), b.cuda(), 0.3, transposed=transposed)
    assert merged.is_cuda
    assert torch.equal(merged.cpu(), with_adapter(stored, a, b, 0.3, transposed=transposed))
    some = merged.T[:20] if transposed else merged[:20]
    assert torch.equal(some.cpu(), merged_by_hand(before[:20], a, b[:20], 0.3))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", Precision)
def test_a_sampler_is_given_what_it_would_load(tmp_path, tied, precision):
    base = write_base(tmp_path / "policy", tied=tied)
    assert_sampled_as_loaded(base, tmp_path / "adapter", "cuda", precision)


def test_one_weight_is_merged_in_little_more_than_its_own_memory():
    rank = 16
    before, a, b = torch.randn(8192, 8192), torch.randn(rank, 8192), torch.randn(8192, rank)
    a, b = a.cuda(), b.cuda()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with_adapter(before, a, b, 2.0, transposed=False)
    assert torch.cuda.max_memory_allocated() - held < 2 * before.nbytes + 2**27
