"""Where the random numbers of a sample come from, and that they draw what they should.

What else holds of the padded batches that these tests decode, holds of every generator
(test_generators.py).
"""

from types import SimpleNamespace

import pytest
import torch

from stages.engines.generation.drawing import uniforms
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.padded import generate
from tests.stages.test_truncated_sampling import PROBABILITIES, FixedPolicy


def test_a_seed_stands_for_the_same_tokens_for_ever():
    class Ramp:
        """Logits that grow with the token's distance from the last one."""

        device, config = torch.device("cpu"), SimpleNamespace(eos_token_id=8, pad_token_id=0)

        def __call__(self, input_ids, **_):
            logits = ((torch.arange(8) - input_ids[:, -1:]) % 8).float() / 2
            return SimpleNamespace(logits=logits[:, None], past_key_values=None)

    requests = [Request([1], seed=7), Request([1], seed=2**62), Request([5], seed=7)]
    completions = generate(Ramp(), requests, max_new_tokens=10, sampling=Sampling())
    assert [completion.ids for completion in completions] == [
        [0, 1, 7, 5, 3, 1, 4, 2, 0, 6],
        [0, 7, 6, 4, 0, 7, 0, 1, 0, 7],
        [3, 0, 7, 5, 3, 1, 4, 2, 0, 6],
    ]


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_position():
    seeds = torch.arange(20_000)
    drawn = torch.stack([uniforms(seeds, position) for position in range(3)])
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert drawn.mean(1).tolist() == pytest.approx([0.5] * 3, abs=0.01)
    assert drawn.var(1).tolist() == pytest.approx([1 / 12] * 3, abs=0.002)
    assert abs(float(torch.corrcoef(drawn)[0, 1])) < 0.03


def test_tokens_are_drawn_with_their_probabilities():
    requests = [Request([1, 5, 6], seed=i * 7919) for i in range(4000)]
    completions = generate(
        FixedPolicy(PROBABILITIES), requests, max_new_tokens=1, sampling=Sampling()
    )
    drawn = torch.bincount(torch.tensor([c.ids[0] for c in completions]), minlength=6)
    torch.testing.assert_close(drawn / 4000, torch.tensor(PROBABILITIES), atol=0.03, rtol=0)
