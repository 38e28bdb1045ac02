"""vLLM beside a learner that is spread: weights that NCCL has gathered, given by CUDA IPC.

NCCL takes one rank on one GPU, which does all that several would. Its process group keeps vLLM's
engine in a process of its own, as in a job of several ranks. test_vllm.py runs this in a process
that has vLLM.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from stages.context import Context
from stages.contracts.precision import Precision
from stages.contracts.rollout import Engine
from stages.contracts.sharding import Sharding
from stages.engines.generation.resident_sampler import ResidentSampler
from stages.engines.generation.weight_pieces import Through
from stages.engines.models.folders import load_policy
from stages.engines.processes.ranks import ALONE
from stages.engines.training.learner import Optimization
from stages.engines.training.learners import open_learner
from tests.stages.test_generators import tiny_llama
from tests.stages.vllm_gpu_cases import OPTIONS, REQUESTS, ROUNDING, SIZES, worst_gap

DEVICE, BACKEND, THROUGH = "cuda:0", "nccl", Through.GPU
BFLOAT16 = Precision.BFLOAT16
CONFIG = SimpleNamespace(
    precision=BFLOAT16,
    online=SimpleNamespace(overlap=False),
    rollout=SimpleNamespace(batch_size=64, engine=Engine.VLLM),
    algorithm=SimpleNamespace(is_policy_gradient=True),
)


@pytest.fixture
def _no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_no_group_is_left")
def test_an_engine_of_its_own_answers_with_the_weights_that_were_gathered(tmp_path):
    """Also after it has slept, and the learner has moved on."""
    folders = [tiny_llama(tmp_path / str(seed), seed, **SIZES) for seed in (0, 1)]
    ctx = Context("test", None, 3, tmp_path / "job", device=DEVICE, sharding=Sharding.FSDP)
    ctx.generator_memory = 0.3
    how = Optimization(1e-3, 1.0, precision=BFLOAT16)
    learner = open_learner(ctx, ALONE, load_policy(folders[0]), how)
    assert dist.get_backend() == BACKEND
    with (
        ThreadPoolExecutor(1) as hasher,
        closing(ResidentSampler(CONFIG, folders[0], learner, ctx, hasher, 320)) as sampler,
    ):
        for folder in folders:
            weights = load_policy(folder).named_parameters()
            learner.load({f"weight.{name}": weight.data for name, weight in weights})
            sampler.take()
            assert sampler._vllm._apart
            assert sampler._vllm._through is THROUGH
            with sampler.opened() as generator:
                completions = generator.generate(REQUESTS, **OPTIONS)
            gap, expected_hash = worst_gap(folder, completions)
            assert gap < ROUNDING
            assert sampler.policy_hash() == expected_hash
            sampler.rest()
