"""The hash of weights in memory, computed while a model answers with them.

From a GPU they are copied to memory that is set aside once; those of a resident model in a stream
of their own, so that the model need not wait for it: whoever starts its hash leaves the weights as
they are until the hash is there.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

import torch
from torch import Tensor

from stages.engines.models.folders import hash_lines, hash_of_weights
from stages.engines.models.lora import named_weights


class BackgroundHash:
    def __init__(self, thread: Executor) -> None:
        self._thread = thread
        self._copies: dict[str, Tensor] = {}
        self._device: torch.device | None = None
        """The GPU that the copies are of."""
        self._stream: torch.cuda.Stream | None = None
        self._hash: Future[str] | None = None
        self._lines: Future[dict[str, bytes]] | None = None

    def start(self, model: Any) -> None:
        device = next(model.parameters()).device
        copied = None
        if device.type == "cuda":
            beside = self._beside(device)
            with torch.cuda.stream(beside):
                weights = [
                    (name, self._copied(name, one.detach())) for name, one in named_weights(model)
                ]
            copied = beside.record_event()
        else:
            weights = list(named_weights(model))

        def hashed() -> str:
            if copied is not None:
                copied.synchronize()
            return hash_of_weights(weights)

        self._hash = self._thread.submit(hashed)

    def wait(self) -> str:
        assert self._hash is not None
        return self._hash.result()

    def copied(self, name: str, weight: Tensor) -> Tensor:
        """A copy of a weight that is about to move on, for `start_lines`."""
        weight = weight.detach()
        return self._copied(name, weight) if weight.is_cuda else weight.clone()

    def start_lines(self, copies: Sequence[tuple[str, Tensor]]) -> None:
        """Compute what a hash is made of, of some weights."""
        copied = None
        if self._device is not None:
            copied = torch.cuda.current_stream(self._device).record_event()

        def hashed() -> dict[str, bytes]:
            if copied is not None:
                copied.synchronize()
            lines = hash_lines(copies, lambda _, copy: copy)
            return {name: line for (name, _), line in zip(copies, lines, strict=True)}

        self._lines = self._thread.submit(hashed)

    def wait_lines(self) -> dict[str, bytes]:
        assert self._lines is not None
        return self._lines.result()

    def _beside(self, device: torch.device) -> torch.cuda.Stream:
        """A stream that begins with what the present one has been asked for so far."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return self._stream

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        if name not in self._copies:
            self._device = tensor.device
            self._copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return self._copies[name].copy_(tensor, non_blocking=True)
