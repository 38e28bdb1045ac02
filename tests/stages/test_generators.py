"""What every generator keeps to, whatever decodes: the same tests for each engine.

An engine is a factory: `open_engine(folder, slots)` gives a generator with the weights of a folder.
`LOGPROB_BOUND` is how far its log-probs may be from the trainer's.
"""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from stages.contracts.precision import Precision
from stages.contracts.rollout import Engine
from stages.data.batching import collate
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.generation.generator import GeneratorSettings, Request, Sampling
from stages.engines.generation.generators import open_generator
from stages.engines.models.folders import content_hash, load_policy

LOGPROB_BOUND = 1e-5
ENGINES = os.environ.get("LOCKSTEP_TESTED_ENGINE", "torch padded").split()
"""vLLM changes the process that it is in, so test_vllm.py runs these tests for it in another."""
FORM = {"torch": {}, "padded": {"sliding_window": 8}, "vllm": {}}
"""What the torch generator's own decoding does not know is decoded in padded batches."""
ENDS = [2, 3]
PROMPTS = ([1, 5, 6], [1, 7, 8, 9, 10, 11], [1], [1, 4, 4, 4], [1, *range(4, 24), *range(4, 24)])
REQUESTS = [Request(PROMPTS[i % len(PROMPTS)], seed=1000 + i) for i in range(15)]
WARM = Sampling(temperature=1.5)


@dataclass(frozen=True)
class Setting:
    """An engine with a policy's folder, and the same policy as the trainer has it."""

    engine: str
    folder: object
    policy: object
    one_vllm: object = None

    def open(self, slots=4):
        if self.engine == "vllm":
            return self.one_vllm(self.folder)
        settings = GeneratorSettings("cpu", Precision.FLOAT32, slots)
        return open_generator(self.folder, Engine.TORCH, settings)


def tiny_llama(folder, seed=0, **changes):
    """Of the Llama family; with a sliding window, a Mistral."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 24,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "eos_token_id": ENDS,
        "initializer_range": 0.2,
        **changes,
    }
    windowed = "sliding_window" in changes
    model = (
        MistralForCausalLM(MistralConfig(**sizes))
        if windowed
        else LlamaForCausalLM(LlamaConfig(**sizes))
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=ENGINES)
def setting(request, tmp_path_factory):
    folder = tiny_llama(tmp_path_factory.mktemp("policy"), **FORM[request.param])
    one_vllm = request.getfixturevalue("one_vllm") if request.param == "vllm" else None
    return Setting(request.param, folder, load_policy(folder), one_vllm)


@pytest.fixture(scope="module")
def generator(setting):
    generator = setting.open()
    yield generator
    generator.close()


def test_greedy_answers_are_those_of_plain_generate(setting, generator):
    requests = [Request(prompt) for prompt in PROMPTS]
    for request, completion in zip(
        requests, generator.generate(requests, max_new_tokens=20, sampling=Sampling()), strict=True
    ):
        expected = setting.policy.generate(
            torch.tensor([request.prompt_ids]), max_new_tokens=20, do_sample=False
        )
        assert completion.ids == expected[0, len(request.prompt_ids) :].tolist()


@pytest.mark.parametrize("sampling", [WARM, Sampling(0.8, top_p=0.8, top_k=9, min_p=0.01)])
def test_log_probs_and_entropies_are_the_trainers(setting, generator, sampling):
    if setting.engine == "vllm" and sampling.cuts:
        pytest.skip("vLLM tells no supports")
    completions = generator.generate(REQUESTS, max_new_tokens=24, sampling=sampling)
    for request, completion in zip(REQUESTS, completions, strict=True):
        batch = collate(
            [request.prompt_ids], [completion.ids], pad_id=0, supports=[completion.support]
        )
        with torch.no_grad():
            expected = response_logprobs(setting.policy, batch, sampling.temperature)
        assert completion.logprobs == pytest.approx(
            expected.logprobs[0].tolist(), abs=LOGPROB_BOUND
        )
        # vLLM only estimates it.
        estimated = setting.engine == "vllm"
        entropy = -sum(completion.logprobs) if estimated else float(expected.entropies.sum())
        assert completion.entropy == pytest.approx(entropy, abs=24 * LOGPROB_BOUND)


def test_an_answer_depends_on_its_seed_and_not_on_its_neighbours(setting, generator):
    together = generator.generate(REQUESTS, max_new_tokens=24, sampling=WARM)
    assert generator.generate(REQUESTS, max_new_tokens=24, sampling=WARM) == together
    alone = setting.open(slots=1)
    for request, expected in zip(REQUESTS, together, strict=True):
        (completion,) = alone.generate([request], max_new_tokens=24, sampling=WARM)
        assert completion.ids == expected.ids
        assert completion.finish_reason == expected.finish_reason
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    alone.close()


def test_samples_of_one_prompt_differ_by_their_seeds(generator):
    requests = [Request(PROMPTS[0], seed=i) for i in (*range(8), *range(8))]
    said = [
        tuple(completion.ids)
        for completion in generator.generate(requests, max_new_tokens=12, sampling=WARM)
    ]
    assert len(set(said)) == 8
    assert said[:8] == said[8:]


def test_an_answer_ends_with_its_only_end_token_or_is_cut(generator):
    completions = generator.generate(REQUESTS, max_new_tokens=12, sampling=Sampling(2.0))
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    # Both end tokens do end answers.
    assert {c.ids[-1] for c in completions if c.finish_reason == "stop"} == set(ENDS)
    for completion in completions:
        assert not set(ENDS) & set(completion.ids[:-1])
        if completion.finish_reason == "length":
            assert len(completion.ids) == 12
            assert completion.ids[-1] not in ENDS
        assert len(completion.logprobs) == len(completion.ids)


def test_one_token_may_be_all(generator):
    completions = generator.generate(REQUESTS, max_new_tokens=1, sampling=WARM)
    assert [len(completion.ids) for completion in completions] == [1] * len(REQUESTS)
    for completion in completions:
        expected = "stop" if completion.ids[0] in ENDS else "length"
        assert completion.finish_reason == expected


def test_short_and_long_calls_follow_each_other(setting, generator):
    fresh = setting.open()
    short, long = REQUESTS[:2], [Request([1, *range(4, 24)] * 4, seed=5), *REQUESTS]
    for requests, max_new_tokens in ((short, 3), (long, 40), (short, 3), (REQUESTS, 24)):
        options = {"max_new_tokens": max_new_tokens, "sampling": WARM}
        once = generator.generate(requests, **options)
        again = fresh.generate(requests, **options)
        assert [c.ids for c in once] == [c.ids for c in again]
    fresh.close()


def test_other_weights_give_other_answers_under_another_hash(setting, tmp_path):
    other = tiny_llama(tmp_path / "other", seed=1, **FORM[setting.engine])
    generator = setting.open()
    before = generator.generate(REQUESTS, max_new_tokens=12, sampling=WARM)
    assert generator.policy_hash == content_hash(setting.policy)
    generator.load(other)
    after = generator.generate(REQUESTS, max_new_tokens=12, sampling=WARM)
    assert generator.policy_hash == content_hash(load_policy(other))
    assert [c.ids for c in after] != [c.ids for c in before]
    generator.load(setting.folder)
    again = generator.generate(REQUESTS, max_new_tokens=12, sampling=WARM)
    assert [c.ids for c in again] == [c.ids for c in before]
    generator.close()


def test_sleep_and_wake_change_no_answer(setting):
    generator = setting.open()
    options = {"max_new_tokens": 12, "sampling": WARM}
    before = generator.generate(REQUESTS, **options)
    generator.sleep()
    generator.wake()
    assert generator.generate(REQUESTS, **options) == before
    assert generator.policy_hash == content_hash(setting.policy)
    generator.close()


def test_an_answer_may_have_stops_and_a_limit_of_its_own(generator):
    stops = (5, 9)
    limits = [1 + i % 7 for i in range(len(REQUESTS))]
    plain = generator.generate(REQUESTS, max_new_tokens=24, sampling=WARM)
    cut = generator.generate(
        [replace(each, max_new_tokens=limit) for each, limit in zip(REQUESTS, limits, strict=True)],
        max_new_tokens=24,
        sampling=replace(WARM, stop_ids=stops),
    )
    reasons = set()
    for whole, short, limit in zip(plain, cut, limits, strict=True):
        ends = [i for i, token in enumerate(whole.ids) if token in (*ENDS, *stops)]
        expected = whole.ids[: min([limit, *(1 + i for i in ends)])]
        assert short.ids == expected
        assert short.logprobs == pytest.approx(whole.logprobs[: len(expected)], abs=1e-4)
        assert (short.finish_reason == "stop") is (expected[-1] in (*ENDS, *stops))
        reasons.add(expected[-1] if expected[-1] in stops else short.finish_reason)
    assert reasons == {*stops, "stop", "length"}
    again = generator.generate(REQUESTS, max_new_tokens=24, sampling=WARM)
    assert again == plain
