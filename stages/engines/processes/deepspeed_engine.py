"""DeepSpeed over the ranks that were joined: it starts no process, compiles nothing, says little.

What is used here is in part not its public face (deepspeed_members.py): the optimizers of ZeRO
without the loop around them, in which a step has a fixed number of micro-batches.
"""

import importlib
import logging
import os
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from stages.context import Context, StageError
from stages.contracts.precision import Precision
from stages.contracts.sharding import Offload, Sharding
from stages.engines.models.lean_transformers import hidden
from stages.engines.processes.deepspeed_members import check_members, check_version
from stages.engines.processes.ranks import connect_alone

BUCKET_ELEMENTS = 50_000_000
"""Size of a gradient bucket, in numbers."""
ZERO_STAGES = {Sharding.ZERO1: 1, Sharding.ZERO2: 2, Sharding.ZERO3: 3}


def open_engine(ctx: Context, model: Any, optimizer: Any, config: dict[str, Any]) -> Any:
    connect(ctx)
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine

    class Engine(DeepSpeedEngine):  # type: ignore[misc]
        def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:  # noqa: ARG002
            # Its other optimizer for bfloat16, chosen with stage 1, has another form of everything.
            return ZERO_OPTIMIZATION

    if ctx.sharding is Sharding.ZERO3:
        _partition(model, torch.device(ctx.device), config)
    engine = Engine(
        args=SimpleNamespace(device_rank=torch.device(ctx.device).index or 0),
        model=model,
        optimizer=optimizer,
        config=config,
        config_class=DeepSpeedConfig(config),
        dist_init_required=False,
    )
    _check(engine, ctx.sharding)
    return engine


def _check(engine: Any, sharding: Sharding) -> None:
    """StageError where the engine lacks what is used of it."""
    from deepspeed import __version__

    zero, learning = engine.optimizer, (p for p in engine.module.parameters() if p.requires_grad)
    kind = "zero3" if sharding is Sharding.ZERO3 else "zero1 and zero2"
    objects = {
        "engine": engine,
        "optimizer": zero,
        f"optimizer of {kind}": zero,
        f"parameter of {kind}": next(learning),
    }
    check_members(__version__, objects)
    if sharding is Sharding.ZERO3:
        check_members(__version__, {"parameter offload": zero.parameter_offload})


def _partition(model: Any, device: torch.device, config: dict[str, Any]) -> None:
    """Take the weights one by one, so that no rank ever has to find room for all of them.

    Left to itself, the engine first rounds the whole model, and moves all of it to the GPU.
    """
    from deepspeed.runtime.zero.partition_parameters import Init

    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32

    class Rounding(Init):  # type: ignore[misc]
        def _zero_init_param(self, param: Any) -> None:
            # What is not read yet has one number in memory.
            param.data = param.data.to(dtype).contiguous()
            super()._zero_init_param(param)

    Rounding(module=model, config_dict_or_path=config, dtype=dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def configured(ctx: Context, max_grad_norm: float, precision: Precision) -> dict[str, Any]:
    on_gpu = ctx.device.startswith("cuda")
    host = {"device": "cpu", "pin_memory": on_gpu}
    zero: dict[str, Any] = {
        "stage": ZERO_STAGES[ctx.sharding],
        # With the others, it would add gradients up while a step has still micro-batches to come.
        "overlap_comm": ctx.sharding is Sharding.ZERO3,
        "reduce_bucket_size": BUCKET_ELEMENTS,
    }
    if ctx.offload is not Offload.NONE:
        zero["offload_optimizer"] = host
    if ctx.offload is Offload.ALL:
        zero["offload_param"] = host
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": precision is Precision.BFLOAT16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        # AdamW is torch's own, on the host too: DeepSpeed would compile one when it starts.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": max_grad_norm,
        # Who calls says when a step ends; the number of micro-batches differs from step to step.
        "managed_gradient_accumulation": False,
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": 1,
    }


def connect(ctx: Context) -> None:
    """Import it so that it compiles nothing and says little, over the ranks that were joined."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if ctx.device.startswith("cuda") else "cpu")
    # Its tuner, which is not used here, imports MLflow where it can, for seconds.
    with hidden(("mlflow",)):
        try:
            # In this order: it would find a torch that is half imported.
            importlib.import_module("torch._dynamo")
            deepspeed = importlib.import_module("deepspeed")
        except ImportError as error:
            raise StageError(
                "sharding and sequence_parallel in the profile need DeepSpeed, which cannot be "
                f"imported here ({error}): install lockstep-rlhf[deepspeed] in the job's Python, "
                "or set sharding to fsdp, which needs torch alone, and sequence_parallel to 1"
            ) from error
    _check_installed(deepspeed)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="`torch.distributed.*is deprecated")
    connect_alone(ctx.device)
    # Which GPU to take, to DeepSpeed: ranks of a node may share one.
    os.environ["LOCAL_RANK"] = str(torch.device(ctx.device).index or 0)
    _forget_ended_groups()
    deepspeed.comm.init_distributed(dist_init_required=None)


def _check_installed(deepspeed: Any) -> None:
    """StageError where the installed version is another one than was tested."""
    check_version(deepspeed.__version__)
    from deepspeed.comm import comm
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero import stage3
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    check_members(
        deepspeed.__version__,
        {
            "ops": deepspeed.ops,
            "comm": comm,
            "groups": groups,
            "engine class": DeepSpeedEngine,
            "parameter partitioning": Init,
            "zero3 module": stage3,
        },
    )


def _forget_ended_groups() -> None:
    """DeepSpeed keeps process groups beyond their end: those of a job before in this process."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    known = groups._WORLD_GROUP
    if known is not None and known not in dist.distributed_c10d._world.pg_map:
        comm.cdb = None
        groups._release_process_group_references()
