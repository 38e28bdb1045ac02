"""What vllm_programs.py forks its programs from: a process that has imported vLLM.

It takes ten seconds of a processor. The engines and workers that vLLM starts, each in a fresh
interpreter, would import it anew, too: here they are forked from this same process, with the
variables and the output of whoever starts them.
"""

import gc
import importlib
import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any

from stages.contracts.catalog import STAGES
from stages.engines.generation.vllm_process import SETTINGS
from tests.stages.vllm_programs import become

USED = (
    "pytest",
    "pandas",
    *(stage.module for stage in STAGES.values()),
    "transformers.models.llama.modeling_llama",
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


class Forked(ForkServerProcess):
    """In the place of a fresh interpreter."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        starter = (dict(os.environ), target, args, kwargs or {})
        super().__init__(group, become, name, starter, **options)


class InThePlaceOfSpawn(ForkServerContext):
    Process = Forked  # type: ignore[assignment]


NODE = "SLURMD_NODENAME"
"""A variable of programs that are to take each other for processes of other nodes, which a machine
that has one node cannot have: its value is the node's name, and an address of this machine."""
NOWHERE = "nowhere.invalid"
"""What the machines of these programs call themselves: a name that no other node resolves."""
_gethostname = socket.gethostname


def gethostname() -> str:
    return NOWHERE if NODE in os.environ else _gethostname()


def are_on_node_of(group: Any, source_rank: int = 0) -> list[bool]:
    """In the place of vLLM's look at the memory that processes share."""
    import torch.distributed as dist

    if NODE not in os.environ:
        return _are_on_node_of(group, source_rank)
    nodes: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(nodes, os.environ[NODE], group=group)
    return [node == nodes[source_rank] for node in nodes]


_get_context = multiprocessing.get_context


def get_context(method: str | None = None) -> BaseContext:
    return InThePlaceOfSpawn() if method == "spawn" else _get_context(method)


for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)
for name in USED:
    importlib.import_module(name)
multiprocessing.get_context = get_context  # type: ignore[assignment]
socket.gethostname = gethostname
_parallel_state = importlib.import_module("vllm.distributed.parallel_state")
_are_on_node_of = _parallel_state.in_the_same_node_as
_parallel_state.in_the_same_node_as = are_on_node_of
# What is never collected is never copied. vLLM would thaw it when its first engine ends, and walk
# through all of it several times for each engine, half a second each time.
gc.collect()
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None
