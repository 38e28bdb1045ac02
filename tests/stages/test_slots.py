"""Where sequences are decoded: a slot that is left, and one that is taken over."""

import pytest
import torch

from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.llama.slots import Slots

VOCABULARY = 5
REQUESTS = [Request([1, 2, 3], seed=7), Request([4], seed=8), Request([2, 2], seed=9)]


@pytest.fixture
def slots():
    slots = Slots(6, len(REQUESTS), 4, torch.device("cpu"))
    slots.begin(REQUESTS, 4, Sampling(top_k=3), ends=[0])
    return slots


def said(step):
    """Logits of every slot, the same wherever a sequence is; the end token never comes."""
    row = torch.linspace(0, 1, VOCABULARY) * (step + 1)
    row[0] = -50.0
    return row.expand(6, -1)


def test_a_sequence_that_moves_is_decoded_in_its_new_place_alone(slots):
    slots.admit({0: 0, 5: 1})
    slots.record(said(0))
    slots.move({5: 1})
    for step in (1, 2, 3):
        slots.record(said(step))
    found = slots.completions()
    slots.begin(REQUESTS, 4, Sampling(top_k=3), ends=[0])
    slots.admit({0: 0, 1: 1})
    for step in range(4):
        slots.record(said(step))
    expected = slots.completions()
    assert found[:2] == expected[:2]
    assert [len(completion.support) for completion in found[:2]] == [4, 4]


def test_a_slot_that_is_taken_over_has_nothing_of_the_request_before(slots):
    slots.admit({0: 0})
    for step in range(4):
        slots.record(said(step))
    assert slots.state[0].tolist()[3] == ~0, "the first has ended"
    slots.admit({0: 2})
    assert slots.state[0].tolist() == [2, 1, 0, 2, 4]
    for step in range(4):
        slots.record(said(step))
    after = slots.completions()[2]
    slots.begin(REQUESTS, 4, Sampling(top_k=3), ends=[0])
    slots.admit({3: 2})
    for step in range(4):
        slots.record(said(step))
    assert after == slots.completions()[2]
