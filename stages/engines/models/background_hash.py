"""The hash of a resident model's weights, computed while the model answers.

Whoever starts it leaves the weights as they are until the hash is there. From a GPU they are copied
to memory that is set aside once, in a stream of their own: the model need not wait for it.
"""

from concurrent.futures import Executor, Future
from typing import Any

import torch
from torch import Tensor

from stages.engines.models.folders import hash_of_weights
from stages.engines.models.lora import named_weights


class BackgroundHash:
    def __init__(self, thread: Executor) -> None:
        self._thread = thread
        self._copies: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._hash: Future[str] | None = None

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
            self._copies[name] = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return self._copies[name].copy_(tensor, non_blocking=True)
