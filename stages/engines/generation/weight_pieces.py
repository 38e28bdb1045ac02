"""Weights from one process to another through memory, in pieces.

A piece is a buffer that both processes see, with as many whole tensors as it has room for. Always
true:
- The buffer has PIECE_BYTES, or as many as the largest tensor: there is no second copy of a model.
- It is filled again only after the receiver is done with what was there.
- In the host's memory it has no name: however a process ends, nothing is left behind.
"""

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

PIECE_BYTES = 2**28
_ALIGNED = 256
Layout = list[tuple[str, str, list[int], int]]
"""Name, type, shape and first byte of each tensor in a buffer, in values that any RPC takes."""
Where = Tensor | bytes | str
"""A buffer, or what another process opens it by."""
Call = Callable[..., None]
"""(method, *arguments) of the receiver, whose methods are `open_buffer`, with where the pieces will
be, the one that takes a piece, with its layout, and `close_buffer`. Done when it returns."""


class Through(Enum):
    """The memory that the pieces go through."""

    THIS_PROCESS = "this process"
    GPU = "gpu"
    """Of one GPU that both processes use: CUDA IPC."""
    HOST = "host"

    @classmethod
    def between_processes(cls, device: str) -> "Through":
        """On the same device."""
        return cls.GPU if device.startswith("cuda") else cls.HOST


def load(weights: Iterable[tuple[str, Tensor]], call: Call, through: Through, device: str) -> None:
    """Have the receiver load all weights."""
    call("begin_load")
    send(weights, call, "load_piece", through, device)
    call("end_load")


def compare(
    weights: Iterable[tuple[str, Tensor]], call: Call, through: Through, device: str
) -> None:
    """Have the receiver compare all weights with those that it holds."""
    call("begin_comparison")
    send(weights, call, "compare_piece", through, device)
    call("end_comparison")


def send(
    weights: Iterable[tuple[str, Tensor]], call: Call, take: str, through: Through, device: str
) -> None:
    """Have the receiver's method `take` called with all weights, piece by piece."""
    buffer = torch.empty(0)
    layout: Layout = []
    end = 0

    def give() -> None:
        wait_for(buffer)
        call(take, layout)

    for name, weight in weights:
        if layout and end + weight.nbytes > buffer.nbytes:
            give()
            layout, end = [], 0
        if weight.nbytes > buffer.nbytes:
            with _shared(max(PIECE_BYTES, weight.nbytes), through, device) as (buffer, where):
                call("open_buffer", where)
        kind, shape = str(weight.dtype).removeprefix("torch."), list(weight.shape)
        _view(buffer, kind, shape, end).copy_(weight.detach())
        layout.append((name, kind, shape, end))
        end += -(-weight.nbytes // _ALIGNED) * _ALIGNED
    if layout:
        give()
    # Not after a failure: others may have to make this call, too, and need not have failed.
    call("close_buffer")


def opened(where: Where, gpu: int) -> Tensor:
    """The buffer; `gpu` is the number of its GPU in this process."""
    if isinstance(where, Tensor):
        return where
    if isinstance(where, str):
        return _mapped(where)
    rebuild, arguments = pickle.loads(where)
    buffer: Tensor = rebuild(*arguments[:6], gpu, *arguments[7:])
    return buffer


def received(buffer: Tensor, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a piece, which are memory of the buffer."""
    for name, kind, shape, start in layout:
        yield name, _view(buffer, kind, shape, start)


def wait_for(buffer: Tensor) -> None:
    """Until what the GPU was asked to do with the buffer is done."""
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)


def _view(buffer: Tensor, kind: str, shape: list[int], start: int) -> Tensor:
    dtype: torch.dtype = getattr(torch, kind)
    size = torch.Size(shape).numel() * dtype.itemsize
    return buffer[start : start + size].view(dtype).view(shape)


@contextmanager
def _shared(size: int, through: Through, device: str) -> Iterator[tuple[Tensor, Where]]:
    """A buffer, and where another process can open it as long as the block under it lasts."""
    if through is Through.HOST:
        file = os.memfd_create("weights")
        try:
            os.ftruncate(file, size)
            path = f"/proc/{os.getpid()}/fd/{file}"
            yield _mapped(path), path
        finally:
            os.close(file)
        return
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    if through is Through.THIS_PROCESS:
        yield buffer, buffer
        return
    yield buffer, pickle.dumps(reduce_tensor(buffer))  # type: ignore[no-untyped-call]


def _mapped(path: str) -> Tensor:
    size = Path(path).stat().st_size
    # Named: a worker may have another default device.
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8, device="cpu")
