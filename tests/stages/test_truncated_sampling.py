"""Sampling with unlikely tokens cut off: what is kept, what is drawn, what a trainer computes."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from stages.context import Context
from stages.data.batching import collate
from stages.engines.forward.inference import logprobs_by, over_responses
from stages.engines.forward.logprobs import logprobs_of, response_logprobs
from stages.engines.generation import padded
from stages.engines.generation.drawing import within_support
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.padded import generate

CUTS = [
    Sampling(temperature=0.8, top_p=0.7),
    Sampling(temperature=1.3, top_k=5),
    Sampling(temperature=1.5, min_p=0.1),
    Sampling(temperature=1.2, top_p=0.8, top_k=9, min_p=0.02),
]
PROMPTS = ([1, 5, 6], [1, 7, 8, 9, 10, 11], [1], [1, 4, 4, 4])
PROBABILITIES = [0.1, 0.3, 0.02, 0.3, 0.2, 0.08]


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        eos_token_id=2,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def requests():
    seeded = [Request(PROMPTS[i % 4], seed=1000 + i) for i in range(16)]
    return [*seeded, *(Request(prompt) for prompt in PROMPTS)]


def kept(probabilities, **cuts):
    logprobs = torch.tensor([probabilities], dtype=torch.float64).log()
    return within_support(logprobs, Sampling(**cuts))[0].nonzero().squeeze(-1).tolist()


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ({"top_k": 1}, [1]),  # of two equals, the lower id
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 4}, [0, 1, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.01}, [1]),  # the likeliest is always kept
        ({"top_p": 0.29}, [1]),
        ({"top_p": 0.31}, [1, 3]),
        ({"top_p": 0.85}, [0, 1, 3, 4]),
        ({"min_p": 0.5}, [1, 3, 4]),
        ({"min_p": 0.3}, [0, 1, 3, 4]),
        # top_p counts what top_k has left, renormalised: 0.3 of 0.8 is less than 0.7 of it.
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),
        ({"top_k": 3, "top_p": 0.76}, [1, 3, 4]),
        # and what min_p has left: 0.6 of 0.9 is less than 0.7, 0.8 of it is not.
        ({"min_p": 0.3, "top_p": 0.88}, [1, 3, 4]),
        ({"top_p": 0.88}, [0, 1, 3, 4]),
    ],
)
def test_which_tokens_are_kept(cuts, expected):
    assert kept(PROBABILITIES, **cuts) == expected


def test_equals_are_kept_in_the_order_of_their_ids():
    assert kept([0.25] * 4, top_k=3) == [0, 1, 2]
    assert kept([0.25] * 4, top_p=0.6) == [0, 1, 2]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(-8, 8), min_size=1, max_size=12),
    st.floats(0.01, 1.0),
    st.integers(0, 12),
    st.just(0.0) | st.floats(1e-3, 0.99),
)
def test_a_support_is_the_least_likely_cut_off_in_the_order_of_vllm(logits, top_p, top_k, min_p):
    """Against the definition in plain floats, where it is not decided by rounding."""
    logprobs = torch.tensor([logits], dtype=torch.float64).log_softmax(-1)
    probabilities = dict(enumerate(logprobs[0].exp().tolist()))
    left = sorted(probabilities, key=lambda token: (-float(logprobs[0, token]), token))
    edges = []
    if min_p > 0:
        least = min_p * probabilities[left[0]]
        edges += [probabilities[token] / least - 1 for token in left]
        left = [token for token in left if probabilities[token] >= least]
    left = left[:top_k] if top_k else left
    if top_p < 1:
        total = sum(probabilities[token] for token in left)
        sums = [sum(probabilities[t] for t in left[:i]) / total for i in range(len(left))]
        edges += [before - top_p for before in sums]
        left = [token for token, before in zip(left, sums, strict=True) if before < top_p]
    if all(abs(edge) > 1e-12 for edge in edges):
        found = within_support(logprobs, Sampling(top_p=top_p, top_k=top_k, min_p=min_p))
        assert found[0].nonzero().squeeze(-1).tolist() == sorted(left)


def test_tokens_are_drawn_with_the_renormalised_probabilities(monkeypatch):
    """Over evenly spaced random numbers the shares are exact."""
    count = 4000
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    monkeypatch.setattr(padded, "uniforms", lambda *_: grid)
    fixed = FixedPolicy(PROBABILITIES)
    sampling = Sampling(top_k=4)
    completions = generate(
        fixed, [Request([1], seed=0)] * count, max_new_tokens=1, sampling=sampling
    )
    drawn = torch.bincount(torch.tensor([c.ids[0] for c in completions]), minlength=6) / count
    expected = [p / 0.9 if token in (0, 1, 3, 4) else 0 for token, p in enumerate(PROBABILITIES)]
    assert drawn.tolist() == pytest.approx(expected, abs=1.01 / count)
    assert all(c.support == [[0, 1, 3, 4]] for c in completions)
    for completion in completions:
        share = expected[completion.ids[0]]
        assert completion.logprobs[0] == pytest.approx(math.log(share), abs=1e-6)
    entropy = -sum(p * math.log(p) for p in expected if p)
    assert completions[0].entropy == pytest.approx(entropy, abs=1e-5)


@pytest.mark.parametrize("sampling", CUTS, ids=["top_p", "top_k", "min_p", "all"])
def test_the_trainer_computes_what_the_sampler_drew_from(policy, requests, sampling, tmp_path):
    completions = generate(policy, requests, max_new_tokens=12, sampling=sampling)
    sizes = {len(kept) for completion in completions for kept in completion.support}
    assert min(sizes) < 24
    rows = [
        {"prompt_ids": r.prompt_ids, "response_ids": c.ids, "support": c.support, "loss_mask": None}
        for r, c in zip(requests, completions, strict=True)
    ]
    ctx = Context(stage="test", key=None, seed=0, folder=tmp_path, micro_tokens=60)
    of_policy = logprobs_by("policy", lambda: policy, sampling.temperature)
    found = over_responses(ctx, rows, of_policy)
    entropies = over_responses(
        ctx,
        rows,
        replace(
            of_policy, compute=lambda m, b: response_logprobs(m, b, sampling.temperature).entropies
        ),
    )
    for completion, logprobs, entropy in zip(completions, found, entropies, strict=True):
        assert len(completion.support) == len(completion.ids) == len(completion.logprobs)
        assert all(ids == sorted(set(ids)) for ids in completion.support)
        assert logprobs == pytest.approx(completion.logprobs, abs=1e-5)
        assert sum(entropy) == pytest.approx(completion.entropy, abs=1e-4)


def test_the_probabilities_of_a_support_sum_to_one(policy):
    sampling = Sampling(top_p=0.8)
    (completion,) = generate(policy, [Request([1, 5], 3)], max_new_tokens=1, sampling=sampling)
    (support,) = completion.support
    assert len(support) > 2
    batch = collate(
        [[1, 5]] * len(support), [[i] for i in support], 0, supports=[[support]] * len(support)
    )
    with torch.no_grad():
        found = response_logprobs(policy, batch, 1.0).logprobs[:, 0]
        whole = logprobs_of(policy, batch, batch.response_ids[:, :, None], 1.0)[:, 0, 0]
    assert float(found.exp().sum()) == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(found, whole - whole.logsumexp(0))
    assert 0.8 <= float(whole.exp().sum()) < 1


@pytest.mark.parametrize("sampling", CUTS, ids=["top_p", "top_k", "min_p", "all"])
def test_a_sample_does_not_depend_on_its_neighbours(policy, requests, sampling):
    together = generate(policy, requests, max_new_tokens=12, sampling=sampling)
    for request, expected in zip(requests, together, strict=True):
        (alone,) = generate(policy, [request], max_new_tokens=12, sampling=sampling)
        assert alone.ids == expected.ids
        assert alone.support == expected.support
        assert alone.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_the_likeliest_token_is_taken_from_its_support(policy):
    sampling = Sampling(top_p=0.6)
    (greedy,) = generate(policy, [Request([1, 5, 6])], max_new_tokens=8, sampling=sampling)
    (whole,) = generate(policy, [Request([1, 5, 6])], max_new_tokens=8, sampling=Sampling())
    assert greedy.ids == whole.ids
    assert whole.support is None
    assert all(token in ids for token, ids in zip(greedy.ids, greedy.support, strict=True))
    assert sum(greedy.logprobs) > sum(whole.logprobs)
    assert greedy.entropy < whole.entropy


def test_with_one_token_left_everything_is_certain(policy, requests):
    for completion in generate(policy, requests, max_new_tokens=6, sampling=Sampling(top_k=1)):
        assert completion.logprobs == [0.0] * len(completion.ids)
        assert completion.entropy == 0
        assert completion.support == [[token] for token in completion.ids]


class FixedPolicy:
    """One distribution, whatever came before."""

    device = torch.device("cpu")
    config = SimpleNamespace(eos_token_id=99, pad_token_id=0)

    def __init__(self, probabilities):
        self._logits = torch.tensor(probabilities).log()

    def __call__(self, input_ids, **_):
        logits = self._logits.expand(len(input_ids), 1, -1)
        return SimpleNamespace(logits=logits, past_key_values=None)
