"""AdamW's moments in the host's memory, and a GPU that they pass through."""

import pytest
import torch

from stages.contracts.sharding import Offload
from stages.engines.training import offload
from tests.stages.test_offload import a_learner, assert_same, contents, take_steps

pytestmark = pytest.mark.gpu
SIZES = {
    "vocab_size": 5000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("piece", [2**32, 2**24, 1])
def test_moments_on_the_host_end_with_the_same_bits(piece, monkeypatch):
    monkeypatch.setattr(offload, "PIECE_BYTES", piece)
    plain, offloaded = (a_learner(kept, "cuda", sizes=SIZES) for kept in list(Offload)[:2])
    for steps in ([0], range(1, 6)):
        assert take_steps(plain, steps) == take_steps(offloaded, steps)
        assert_same(contents(plain), contents(offloaded))


def test_no_more_than_two_pieces_are_on_the_gpu(monkeypatch):
    monkeypatch.setattr(offload, "PIECE_BYTES", 2**24)
    learner = a_learner(Offload.OPTIMIZER, "cuda", sizes=SIZES)
    take_steps(learner, [0])
    moments = [learner.whole(name) for name in learner.held() if name.startswith("moment.exp")]
    assert all(moment.is_pinned() for moment in moments)
    for weight in learner.parameters():
        weight.grad = torch.ones_like(weight)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    learner.step(1.0)
    largest = 2 * max(moment.nbytes for moment in moments)
    assert torch.cuda.max_memory_allocated() - before <= 2 * max(2**24, largest) + 2**20
    assert sum(moment.nbytes for moment in moments) > 8 * 2**24
