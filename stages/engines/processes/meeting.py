"""Where the processes of a group find each other, and through what they then talk."""

from datetime import timedelta
from typing import Any

import torch
from torch.distributed.rendezvous import rendezvous


def open_store(rank: int, world: int, timeout: timedelta) -> Any:
    """What all ranks of a job read and write, at the place that the environment names."""
    store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
    store.set_timeout(timeout)
    return store


def backend_of(store: Any, rank: int, world: int, device: torch.device) -> str:
    """Of a group of so many ranks, which have a store of their own; all of them ask."""
    if device.type != "cuda":
        return "gloo"
    torch.cuda.set_device(device)
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return backend_of_gpus(store, rank, world, gpu)


def backend_of_gpus(store: Any, rank: int, world: int, gpu: str) -> str:
    """NCCL refuses two ranks on one GPU, which meet through the host's memory; all ranks ask."""
    store.set(f"gpu-{rank}", gpu)
    num_gpus = len({store.get(f"gpu-{each}") for each in range(world)})
    return "nccl" if num_gpus == world else "gloo"
