"""What vLLM's processes inherit: the variables that they read, the GPUs they see, their signals.

vLLM's engine has a process of its own
- in a deterministic job: batch invariance replaces some of torch's kernels for good, and torch's
  deterministic mode forbids kernels that vLLM needs. What else this process computes must not
  depend on whether it has generated before, or generates just now;
- where this process has a process group, which vLLM would take for its own, and end;
- on any GPU but the first, since vLLM takes the first that it sees.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import resource_tracker

import torch
import torch.distributed as dist

from stages.context import StageError

ENGINE_APART = "VLLM_ENABLE_V1_MULTIPROCESSING"
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
SETTINGS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Which cores a job may use is for its scheduler to say.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
"""Variables that vLLM reads when it is imported; what a user has set stays."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
NOT_FOR_WORKERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
"""What a scheduler sends to a whole job: this process answers it, and ends its workers."""


def set_variables(*, on_gpu: bool, num_workers: int, elsewhere: bool) -> bool:
    """For vLLM to read; whether they give its engine a process of its own.

    `elsewhere` is on other GPUs than those that this process would give it.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    if on_gpu and deterministic:
        os.environ.setdefault(BATCH_INVARIANT, "1")
    if find_spec("flashinfer") is None:
        # vLLM 0.24 imports it, to see whether its sampler would do.
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    replaces_kernels = os.environ.get(BATCH_INVARIANT) == "1"
    # Over several GPUs it is the workers, processes of their own, that compute.
    one_worker = num_workers == 1
    grouped = dist.is_available() and dist.is_initialized()
    wanted = grouped or elsewhere or ((deterministic or replaces_kernels) and one_worker)
    for name, value in {**SETTINGS, ENGINE_APART: str(int(wanted))}.items():
        os.environ.setdefault(name, value)
    apart = os.environ[ENGINE_APART] == "1"
    if grouped and not apart:
        raise StageError(
            f"{ENGINE_APART}=0 has vLLM's engine in this process, whose process group it would "
            "end: unset the variable"
        )
    if deterministic and one_worker and not apart:
        raise StageError(
            f"{ENGINE_APART}=0 has vLLM compute in this process, whose deterministic mode "
            "forbids kernels that it needs: unset the variable, or set deterministic: false "
            "in the profile"
        )
    return apart


@contextmanager
def starting(gpus: Sequence[int], *, workers: bool) -> Iterator[None]:
    """Processes that are started meanwhile see these GPUs alone; without any, all as here.

    If there are such workers, they inherit that some signals do not reach them.
    """
    with _seeing(gpus), _unheard_by_workers(workers):
        yield


def forget_group() -> None:
    """Of this process alone, which vLLM made, and leaves behind where it does not start."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


@contextmanager
def _seeing(gpus: Sequence[int]) -> Iterator[None]:
    before = os.environ.get(VISIBLE)
    if gpus:
        names = before.split(",") if before else list(map(str, range(max(gpus) + 1)))
        os.environ[VISIBLE] = ",".join(names[gpu] for gpu in gpus)
    try:
        yield
    finally:
        if before is not None:
            os.environ[VISIBLE] = before
        elif gpus:
            del os.environ[VISIBLE]


@contextmanager
def _unheard_by_workers(there_are_some: bool) -> Iterator[None]:
    """Here the signals wait until the end, so that none is lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_WORKERS)
    try:
        if there_are_some:
            # Python starts it with the first worker, and then lets some of them through again.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_WORKERS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
