"""vLLM on a GPU, in a deterministic job. test_vllm.py runs these in a process that has it."""

import pytest
import torch

from stages.context import StageError
from stages.contracts.precision import Precision
from stages.data.batching import collate
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.generation.generator import GeneratorSettings, Request, Sampling
from stages.engines.generation.vllm_generator import VllmGenerator
from stages.engines.models.folders import content_hash, load_policy
from stages.engines.processes import determinism
from tests.stages.test_generators import tiny_llama

LONG = [1, *(4 + i % 400 for i in range(200))]
REQUESTS = [Request(prompt, seed=i) for i in range(32) for prompt in (LONG, [1, 5, 6])]
OPTIONS = {"max_new_tokens": 64, "sampling": Sampling(temperature=0.9)}
GIB = 2**30
ROUNDING = 0.15
"""In bfloat16, of a mean over the tokens of an answer; seen on an H200: 0.07."""


SIZES = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "eos_token_id": 2,
    "initializer_range": 0.05,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [tiny_llama(tmp_path_factory.mktemp(f"policy{seed}"), seed, **SIZES) for seed in (0, 1)]


@pytest.fixture(scope="module")
def generator(folders):
    determinism.before_import()
    determinism.after_import()
    settings = GeneratorSettings("cuda", Precision.BFLOAT16, 64, memory_share=0.3)
    generator = VllmGenerator(folders[0], settings)
    yield generator
    generator.close()


def worst_gap(folder, completions):
    """Of the log-probs from the trainer's, a mean over the tokens of one answer."""
    policy = load_policy(folder, "cuda", Precision.BFLOAT16)
    gaps = []
    for request, completion in zip(REQUESTS[:8], completions, strict=False):
        batch = collate([request.prompt_ids], [completion.ids], pad_id=0, device="cuda")
        with torch.no_grad():
            expected = response_logprobs(policy, batch, 0.9).logprobs[0].cpu()
        gaps.append(float((expected - torch.tensor(completion.logprobs)).abs().mean()))
    print("mean gaps", [round(gap, 5) for gap in gaps])
    return max(gaps), content_hash(policy)


def test_log_probs_are_those_of_the_weights_that_were_loaded_last(generator, folders):
    for folder in (*folders, folders[0]):
        generator.load(folder)
        gap, expected_hash = worst_gap(folder, generator.generate(REQUESTS, **OPTIONS))
        assert gap < ROUNDING
        assert generator.policy_hash == expected_hash
    other, _ = worst_gap(folders[1], generator.generate(REQUESTS, **OPTIONS))
    assert other > 3 * ROUNDING


def test_weights_through_memory_answer_as_those_of_their_folder(generator, folders):
    generator.load(folders[1])
    expected = generator.generate(REQUESTS, **OPTIONS)
    generator.load(folders[0])
    policy = load_policy(folders[1], "cuda", Precision.BFLOAT16)
    generator.take(policy.named_parameters())
    generator.compare(policy.named_parameters())
    assert generator.generate(REQUESTS, **OPTIONS) == expected
    for name, parameter in policy.named_parameters():
        changed = parameter.detach().clone()
        changed.view(-1)[-1] += 1
        with pytest.raises(StageError, match="is not what the learner holds"):
            generator.compare({**dict(policy.named_parameters()), name: changed}.items())


def test_answers_repeat_and_do_not_depend_on_their_neighbours(generator, folders):
    generator.load(folders[0])
    together = generator.generate(REQUESTS, **OPTIONS)
    assert generator.generate(REQUESTS, **OPTIONS) == together
    for i in (0, 1, 7):
        assert generator.generate([REQUESTS[i]], **OPTIONS) == [together[i]]


def test_sleep_frees_memory_and_changes_no_answer(generator, folders):
    generator.load(folders[0])
    before = generator.generate(REQUESTS, **OPTIONS)
    awake = torch.cuda.mem_get_info()[0]
    generator.sleep()
    asleep = torch.cuda.mem_get_info()[0]
    print(f"sleep freed {(asleep - awake) / GIB:.1f} GiB")
    total = torch.cuda.mem_get_info()[1]
    assert asleep - awake > 0.2 * total
    generator.load(folders[1])  # wakes
    generator.load(folders[0])
    assert generator.generate(REQUESTS, **OPTIONS) == before
