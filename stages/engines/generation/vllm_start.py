"""How vLLM is started: its options, and its workers on the nodes after its first.

Over several nodes vLLM has an engine on the first, and on each an executor that starts the workers
there. All are given the same options, but for the number of their node.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

from stages.context import StageError
from stages.engines.generation.generator import GeneratorSettings
from stages.engines.generation.vllm_process import BATCH_INVARIANT, set_variables, starting
from stages.engines.generation.vllm_worker import Checked
from stages.engines.models.folders import weights_folder
from stages.engines.models.lora import is_adapter_folder
from stages.engines.models.own_code import may_run
from stages.engines.processes.sampling_group import SamplingGroup

CLOSING_S = 60.0
"""How much later than the first rank another one may come to close its part."""


def engine_options(folder: Path, settings: GeneratorSettings, *, empty: bool) -> dict[str, Any]:
    """For a model folder; `empty` without its weights.

    What it says depends on the GPUs that this process sees.
    """
    on_gpu = settings.device.startswith("cuda")
    options = {
        "dtype": settings.precision.value,
        "max_num_seqs": settings.slots,
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_sleep_mode": on_gpu,
        "enforce_eager": not on_gpu,
        **({"gpu_memory_utilization": settings.memory_share} if on_gpu else {}),
        **(_of_nodes(settings.group) if settings.group is not None else {}),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "load_format": "dummy" if empty else "safetensors",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{Checked.__module__}.{Checked.__qualname__}",
        "disable_log_stats": True,
        "trust_remote_code": may_run(folder),
    }
    if os.environ.get(BATCH_INVARIANT) == "1":
        # A step that is put together before the last one has ended depends on how fast things
        # go, and batch invariance does not keep all of that from the numbers.
        options["async_scheduling"] = False
    if settings.longest is not None:
        options["max_model_len"] = min(settings.longest, _context(folder, options))
    return options


def _of_nodes(group: SamplingGroup) -> dict[str, Any]:
    if group.num_nodes == 1:
        return {}
    return {
        "distributed_executor_backend": "mp",
        "nnodes": group.num_nodes,
        "node_rank": group.node,
        "master_addr": group.host,
        "master_port": group.port,
    }


def _context(folder: Path, options: dict[str, Any]) -> int:
    """The model's, as vLLM takes it from the config; a longer one it refuses."""
    from vllm import EngineArgs

    return int(EngineArgs(model=str(folder), **options).create_model_config().max_model_len)


class NodeWorkers:
    """Those of a vLLM on a node after its first; the first rank there starts and ends them."""

    policy_hash = ""

    def __init__(self, folder: Path, settings: GeneratorSettings, *, empty: bool = False) -> None:
        """They are there once those of all nodes are."""
        group = settings.group
        assert group is not None
        if not empty:
            refuse_adapter_over_nodes(folder, group)
        set_variables(
            on_gpu=settings.device.startswith("cuda"),
            num_workers=settings.tensor_parallel,
            elsewhere=bool(group.gpus),
        )
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        folder = weights_folder(folder) if empty else folder
        with starting(group.gpus, workers=True), group.opening():
            arguments = EngineArgs(
                model=str(folder), **engine_options(folder, settings, empty=empty)
            )
            # As LLM makes it on the first node.
            config = arguments.create_engine_config(
                usage_context=UsageContext.LLM_CLASS, headless=True
            )
            self._executor = MultiprocExecutor(config, monitor_workers=False)
        self._closed = threading.Event()
        self._executor.register_failure_callback(self._lost)
        self._executor.start_worker_monitor()

    def close(self) -> None:
        self._closed.set()
        self._executor.shutdown()

    def _lost(self) -> None:
        """A worker is gone, for which the first rank would wait for ever: the job ends with this.

        Unless it went because the first rank has closed what this one is about to close.
        """
        if not self._closed.wait(CLOSING_S):
            print("error: a worker of vLLM on this node has ended", file=sys.stderr, flush=True)
            os._exit(1)


def refuse_adapter_over_nodes(folder: Path, group: SamplingGroup | None) -> None:
    if group is not None and group.num_nodes > 1 and is_adapter_folder(folder):
        raise StageError(
            f"{folder} is an adapter, which is merged on the first node of a vLLM, and "
            "tensor_parallel spans several: set it to the GPUs of a node, or lora.save to merged"
        )
