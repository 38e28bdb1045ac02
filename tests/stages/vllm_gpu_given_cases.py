"""vLLM on a GPU, in the process of a job that is not deterministic, with weights that it is given.

test_vllm.py runs these in a process that has it.
"""

import pytest
import torch

from stages.context import StageError
from stages.contracts.precision import Precision
from stages.engines.generation.generator import GeneratorSettings
from stages.engines.generation.vllm_generator import VllmGenerator
from stages.engines.models.folders import load_policy
from tests.stages.test_generators import tiny_llama
from tests.stages.vllm_gpu_cases import GIB, OPTIONS, REQUESTS, ROUNDING, SIZES, worst_gap


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [tiny_llama(tmp_path_factory.mktemp(f"policy{seed}"), seed, **SIZES) for seed in (0, 1)]


@pytest.fixture(scope="module")
def generator(folders):
    settings = GeneratorSettings("cuda", Precision.BFLOAT16, 64, memory_share=0.3)
    generator = VllmGenerator(folders[0], settings, empty=True)
    yield generator
    generator.close()


def give(generator, folder):
    policy = load_policy(folder, "cuda", Precision.BFLOAT16)
    generator.take(policy.named_parameters())
    generator.compare(policy.named_parameters())


def test_log_probs_are_those_of_the_weights_that_were_given_last_also_after_a_sleep(
    generator, folders
):
    for folder in (*folders, folders[0]):
        give(generator, folder)
        gap, _ = worst_gap(folder, generator.generate(REQUESTS, **OPTIONS))
        assert gap < ROUNDING
        awake = torch.cuda.mem_get_info()[0]
        generator.sleep()
        asleep, total = torch.cuda.mem_get_info()
        print(f"sleep freed {(asleep - awake) / GIB:.1f} GiB")
        assert asleep - awake > 0.2 * total


def test_weights_that_were_not_given_again_after_a_sleep_are_noticed(generator, folders):
    give(generator, folders[0])
    generator.sleep()
    generator.wake()
    policy = load_policy(folders[0], "cuda", Precision.BFLOAT16)
    with pytest.raises(StageError, match="is not what the learner holds"):
        generator.compare(policy.named_parameters())
