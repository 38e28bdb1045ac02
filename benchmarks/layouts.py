"""A row of docs/scaling.md as a profile and params, and what the program says of it.

What refuses a row is what refuses a run: `refuse_what_cannot_fit` of pipelines.config.memory, over
the stages of a step. A test starts from the same profile, as a file.
"""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipelines.config.memory import Estimator, MemoryUse
from pipelines.config.profiles import Profile
from stages.contracts.params import Params
from stages.contracts.precision import Precision
from stages.contracts.sharding import Sharding
from stages.memory.model import GIB, Layout, Model, Sampling, vllm_sampler
from stages.memory.shape import ModelShape
from stages.memory.work import TORCH_WEIGHTS, Shapes

STAGED = ("rollout", "score", "policy_update")


@dataclass(frozen=True)
class Row:
    """A model on nodes, and the work of a step."""

    shape: ModelShape
    online: bool
    nodes: int
    gpus_per_node: int
    gpu_memory: float
    host_memory: float
    sharding: Sharding
    tensor_parallel: int
    """GPUs that the weights to sample from need."""
    samplers: int
    """GPUs of online that only sample; 0: all sample and learn."""
    slots: int
    samples: int
    sequences: int
    new_tokens: int
    length: int
    micro_tokens: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def stages(self) -> tuple[str, ...]:
        return ("online",) if self.online else STAGED


def profile(row: Row) -> dict[str, Any]:
    """As slurm_profiles/NAME.yaml has it.

    A replica of rollout has GPUs of its own. Ranks that only read hold a model together where it is
    too large for one of them. Each rank of online samples on its own GPU, or over those of its
    neighbours, with as much of them as vLLM needs for all slots; samplers have theirs for it alone.
    """
    ranks = {"nodes": row.nodes, "tasks_per_node": row.gpus_per_node}
    rollout = {"gpus_per_node": row.tensor_parallel, "tensor_parallel": row.tensor_parallel}
    score: dict[str, Any] = {"gpus_per_node": 1}
    online = {**ranks, "sharding": row.sharding.value}
    if row.tensor_parallel > 1:
        score = {**ranks, "sharding": "fsdp"}
        online["tensor_parallel"] = row.tensor_parallel
        share = {"generator_memory": vllm_share(row)}
        online |= {"samplers": row.samplers} if row.samplers else share
    return {
        "executor": "slurm",
        "defaults": {
            "device": "cuda",
            "gpus_per_node": row.gpus_per_node,
            "gpu_memory": f"{int(row.gpu_memory / GIB)}G",
            "memory": f"{int(row.host_memory / GIB)}G",
            "micro_tokens": row.micro_tokens,
            "checkpoint_activations": True,
        },
        "stages": {
            "rollout": rollout,
            "score": score,
            "policy_update": {**ranks, "sharding": row.sharding.value},
            "online": online,
        },
    }


def vllm_share(row: Row) -> float:
    """Of a GPU, that holds its part of the weights and of the cache of all slots."""
    sampling = Sampling(row.slots, row.samples, row.slots * row.length)
    layout = Layout(tensor_parallel=row.tensor_parallel)
    needed = vllm_sampler(Model(row.shape, Precision.BFLOAT16), sampling, layout).total()
    return min(1.0, math.ceil(100 * needed / row.gpu_memory) / 100)


def params(row: Row) -> Params:
    """The torch generator samples in online, as far as one GPU holds the weights."""
    large = row.shape.weights > TORCH_WEIGHTS
    spans = row.tensor_parallel > 1
    return Params.model_validate(
        {
            "precision": "bfloat16",
            "model": {"max_length": row.length},
            "rl": {"algorithm": "grpo", "reward": "verifier"},
            "rollout": {
                "samples": row.samples,
                "max_new_tokens": row.new_tokens,
                "batch_size": row.slots,
                "engine": "vllm" if spans or (large and not row.online) else "torch",
            },
            "policy_update": {"batch_size": row.sequences},
        }
    )


def estimator(row: Row) -> Estimator:
    made = Estimator(Path(), params(row), "row", Profile.model_validate(profile(row)))
    made.shapes = Shapes(row.shape)
    return made


@cache
def use_of(row: Row) -> MemoryUse:
    """Of the stage that learns."""
    use = estimator(row).use(row.stages[-1])
    assert use is not None
    return use


def refusals(row: Row) -> list[str]:
    """For each stage of a step that does not fit: what of, how much, and mostly for what."""
    asked = estimator(row)
    return [
        _in_short(use)
        for stage in row.stages
        if (use := asked.use(stage)) is not None and not use.fits
    ]


def _in_short(use: MemoryUse) -> str:
    where, peak, given = "a node", use.needs.host, use.host_given
    if use.lacks_gpu:
        assert use.needs.gpu is not None
        where, peak, given = "a GPU", use.needs.gpu, use.gpu_given
    ((part, size), *_) = peak.parts.most_common()
    return (
        f"{use.stage} needs {peak.total / 1e9:.0f} of {given / 1e9:.0f} GB of {where}, "
        f"{size / 1e9:.0f} for {part}"
    )
