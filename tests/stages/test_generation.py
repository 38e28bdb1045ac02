"""The torch generator against a plain forward pass, and the promises about its randomness."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.data.batching import collate
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.generation.drawing import uniforms
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.padded import generate
from stages.engines.models.folders import end_ids

OPTIONS = {"max_new_tokens": 12, "sampling": Sampling(temperature=0.8)}
PROMPTS = ([1, 5, 6], [1, 7, 8, 9, 10, 11], [1], [1, 4, 4, 4])


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        eos_token_id=2,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def requests():
    return [Request(PROMPTS[i % 4], seed=1000 + i) for i in range(16)]


def test_log_probs_equal_those_of_a_plain_forward_pass(policy, requests):
    completions = generate(policy, requests, **OPTIONS)
    for request, completion in zip(requests, completions, strict=True):
        batch = collate([request.prompt_ids], [completion.ids], pad_id=0)
        with torch.no_grad():
            expected = response_logprobs(policy, batch, temperature=0.8)
        assert completion.logprobs == pytest.approx(expected.logprobs[0].tolist(), abs=1e-5)
        assert completion.entropy == pytest.approx(float(expected.entropies.sum()), abs=1e-4)


def test_a_sample_does_not_depend_on_its_neighbours(policy, requests):
    together = generate(policy, requests, **OPTIONS)
    for request, expected in zip(requests, together, strict=True):
        (alone,) = generate(policy, [request], **OPTIONS)
        assert alone.ids == expected.ids
        assert alone.finish_reason == expected.finish_reason
        assert alone.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_samples_of_one_prompt_differ_and_repeat(policy):
    requests = [Request([1, 5, 6], seed=i) for i in range(8)]
    first = generate(policy, requests, **OPTIONS)
    assert len({tuple(completion.ids) for completion in first}) > 1
    assert generate(policy, requests, **OPTIONS) == first


def test_a_response_ends_with_its_only_end_token_or_is_cut(policy, requests):
    ends = end_ids(policy)
    # A flatter distribution, so that both endings occur.
    completions = generate(policy, requests, max_new_tokens=12, sampling=Sampling(temperature=3.0))
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert not ends & set(completion.ids[:-1])
        if completion.finish_reason == "stop":
            assert completion.ids[-1] in ends
        else:
            assert len(completion.ids) == 12
            assert completion.ids[-1] not in ends


def test_a_response_may_have_stops_and_a_limit_of_its_own(policy, requests):
    stops, limits = (5, 9), [1 + i % 7 for i in range(len(requests))]
    plain = generate(policy, requests, max_new_tokens=12, sampling=Sampling(temperature=2.0))
    cut = generate(
        policy,
        [replace(each, max_new_tokens=limit) for each, limit in zip(requests, limits, strict=True)],
        max_new_tokens=12,
        sampling=Sampling(temperature=2.0, stop_ids=stops),
    )
    ends = {*end_ids(policy), *stops}
    for whole, short, limit in zip(plain, cut, limits, strict=True):
        at = [1 + i for i, token in enumerate(whole.ids) if token in ends]
        assert short.ids == whole.ids[: min([limit, *at])]
        assert (short.finish_reason == "stop") is (short.ids[-1] in ends)
    assert {short.finish_reason for short in cut} == {"stop", "length"}
    assert {short.ids[-1] for short in cut} & set(stops)


def test_without_a_seed_the_likeliest_token_is_taken(policy):
    (greedy,) = generate(policy, [Request([1, 5, 6])], **OPTIONS)
    batch = collate([[1, 5, 6]], [greedy.ids], pad_id=0)
    with torch.no_grad():
        logits = policy(batch.ids).logits[0, 2:-1]
    assert logits.argmax(-1).tolist() == greedy.ids


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


def test_tokens_are_drawn_with_their_probabilities(policy):
    completions = generate(
        policy,
        [Request([1, 5, 6], seed=i * 7919) for i in range(4000)],
        max_new_tokens=1,
        sampling=Sampling(),
    )
    with torch.no_grad():
        expected = policy(torch.tensor([[1, 5, 6]])).logits[0, -1].softmax(-1)
    drawn = torch.bincount(torch.tensor([c.ids[0] for c in completions]), minlength=len(expected))
    torch.testing.assert_close(drawn / 4000, expected, atol=0.03, rtol=0)
