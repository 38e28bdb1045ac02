"""The torch generator on a GPU: what it keeps to on the CPU, in float32 and in bfloat16."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from stages.contracts.precision import Precision
from stages.data.batching import collate
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.torch_generator import TorchGenerator
from stages.engines.models.background_hash import BackgroundHash
from stages.engines.models.folders import content_hash, load_policy

pytestmark = pytest.mark.gpu
FLOAT32, BFLOAT16 = Precision.FLOAT32, Precision.BFLOAT16
LOGPROB_BOUND = {FLOAT32: 2e-4, BFLOAT16: 0.15}
"""In bfloat16 the trainer's logits are rounded, too: the bound is for both."""
ENDS = [2, 3]
PROMPTS = ([1, 5, 6], [1, 7, 8, 9, 10, 11], [1], [1, 4, 4, 4], [1, *range(4, 84), *range(4, 84)])
REQUESTS = [Request(PROMPTS[i % len(PROMPTS)], seed=1000 + i) for i in range(75)]
WARM = Sampling(temperature=1.2)
SIZES = {
    "vocab_size": 5000,
    "hidden_size": 384,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": ENDS,
    "initializer_range": 0.06,
}


@dataclass(frozen=True)
class Setting:
    precision: Precision
    folder: object
    policy: object

    def open(self, slots=16):
        generator = TorchGenerator("cuda", self.precision, slots)
        generator.load(self.folder)
        return generator


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("policies")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    # Ends that come up now and then.
    model.lm_head.weight.data[ENDS] *= 2.5
    model.save_pretrained(root / "llama")
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.data += 0.1 * torch.randn(64)
    model.save_pretrained(root / "qwen3")
    return root


@pytest.fixture(
    scope="module",
    params=[("llama", FLOAT32), ("llama", BFLOAT16), ("qwen3", FLOAT32)],
    ids=["llama-float32", "llama-bfloat16", "qwen3-float32"],
)
def setting(request, folders):
    name, precision = request.param
    folder = folders / name
    return Setting(precision, folder, load_policy(folder, "cuda", precision))


@pytest.fixture(scope="module")
def generator(setting):
    generator = setting.open()
    yield generator
    generator.close()


@pytest.mark.parametrize("sampling", [WARM, Sampling(1.1, top_p=0.9, top_k=50)])
def test_log_probs_and_entropies_are_the_trainers(setting, generator, sampling):
    bound = LOGPROB_BOUND[setting.precision]
    completions = generator.generate(REQUESTS, max_new_tokens=40, sampling=sampling)
    for request, completion in zip(REQUESTS, completions, strict=True):
        batch = collate(
            [request.prompt_ids], [completion.ids], 0, "cuda", supports=[completion.support]
        )
        with torch.no_grad():
            expected = response_logprobs(setting.policy, batch, sampling.temperature)
        assert completion.logprobs == pytest.approx(expected.logprobs[0].tolist(), abs=bound)
        assert completion.entropy == pytest.approx(float(expected.entropies.sum()), abs=40 * bound)


def test_greedy_answers_are_those_of_plain_generate(setting, generator):
    if setting.precision is BFLOAT16:
        pytest.skip("two tokens may be equally likely")
    requests = [Request(prompt) for prompt in PROMPTS]
    completions = generator.generate(requests, max_new_tokens=20, sampling=Sampling())
    for request, completion in zip(requests, completions, strict=True):
        prompt = torch.tensor([request.prompt_ids], device="cuda")
        expected = setting.policy.generate(prompt, max_new_tokens=20, do_sample=False)
        assert completion.ids == expected[0, prompt.shape[1] :].tolist()


def test_answers_repeat_to_the_byte(setting, generator):
    options = {"max_new_tokens": 40, "sampling": WARM}
    first = generator.generate(REQUESTS, **options)
    assert {completion.finish_reason for completion in first} == {"stop", "length"}
    assert generator.generate(REQUESTS, **options) == first
    fresh = setting.open()
    assert fresh.generate(REQUESTS, **options) == first
    fresh.close()


def test_an_answer_does_not_depend_on_its_neighbours(setting, generator):
    if setting.precision is BFLOAT16:
        pytest.skip("rounding depends on the number of rows, and tokens on rounding")
    together = generator.generate(REQUESTS, max_new_tokens=40, sampling=WARM)
    fewer = setting.open(slots=5)
    apart = fewer.generate(REQUESTS[::-1], max_new_tokens=40, sampling=WARM)[::-1]
    fewer.close()
    pairs = [(a, b) for a, b in zip(apart, together, strict=True) if a.ids == b.ids]
    # Of 5,000 tokens that are almost equally likely, rounding now and then takes the next one.
    assert len(pairs) > 0.8 * len(together)
    for completion, expected in pairs:
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_sleep_frees_the_memory_and_wake_brings_the_same_answers(setting):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    generator = setting.open(slots=1024)
    first = generator.generate(REQUESTS, max_new_tokens=40, sampling=WARM)
    # 1,024 slots of 256 tokens, 3 layers, 2 heads of 64 numbers: 384 MB or more.
    assert torch.cuda.memory_allocated() > before + 384 * 2**20
    generator.sleep()
    # What stays is cuBLAS's workspace of a stream.
    assert torch.cuda.memory_allocated() < before + 100 * 2**20
    generator.wake()
    assert generator.generate(REQUESTS, max_new_tokens=40, sampling=WARM) == first
    assert generator.policy_hash == content_hash(setting.policy)
    generator.close()


def test_a_resident_model_answers_with_its_own_weights_as_they_change(setting):
    policy = load_policy(setting.folder, "cuda", setting.precision)
    generator = TorchGenerator("cuda", setting.precision, 16)
    generator.take(policy, content_hash(policy))
    first = generator.generate(REQUESTS, max_new_tokens=20, sampling=WARM)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.05)
    generator.take(policy, content_hash(policy))
    second = generator.generate(REQUESTS, max_new_tokens=20, sampling=WARM)
    assert second != first
    fresh = TorchGenerator("cuda", setting.precision, 16)
    fresh.take(policy, content_hash(policy))
    assert fresh.generate(REQUESTS, max_new_tokens=20, sampling=WARM) == second
    generator.close()


def test_the_hash_of_a_resident_model_is_that_of_its_weights_as_they_were(setting):
    policy = load_policy(setting.folder, "cuda", setting.precision)
    with ThreadPoolExecutor(1) as thread:
        hashing = BackgroundHash(thread)
        for _ in range(3):
            with torch.no_grad():
                for weight in policy.parameters():
                    weight.mul_(1.05)
            hashing.start(policy)
            assert hashing.wait() == content_hash(policy)
