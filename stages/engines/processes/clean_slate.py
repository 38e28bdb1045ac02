"""What a stage may leave behind in its process, put back as it was, for the next stage in it.

The libraries' switches and random generators, variables, the folder it is in, and what it does at a
signal. No stage imports this: it is for a process that runs several, one after another.
"""

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def remember() -> Callable[[], None]:
    """Look at the process as it is now; returns what puts it back."""
    variables, folder = dict(os.environ), Path.cwd()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    drawn = random.getstate()
    put_back = [_numpy(), *_torch()]

    def restore() -> None:
        os.chdir(folder)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        random.setstate(drawn)
        for put in put_back:
            put()

    return restore


def free_memory() -> None:
    """Let go of what nobody refers to any more, on the GPU as well."""
    import gc

    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _numpy() -> Callable[[], None]:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return lambda: None
    drawn = numpy.random.get_state()
    return lambda: numpy.random.set_state(drawn)


def _torch() -> list[Callable[[], None]]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return []
    cudnn, deterministic = torch.backends.cudnn, torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory
    switches = {name: getattr(cudnn, name) for name in ("deterministic", "benchmark", "allow_tf32")}
    precision = torch.get_float32_matmul_precision()
    default_type, threads = torch.get_default_dtype(), torch.get_num_threads()
    generator = torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def switch_back() -> None:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill
        for name, value in switches.items():
            setattr(cudnn, name, value)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(default_type)
        torch.set_grad_enabled(True)
        torch.set_num_threads(threads)

    def rewind() -> None:
        torch.set_rng_state(generator)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)

    return [switch_back, rewind]
