"""AdamW's moments in the host's memory: each step brings them to the GPU and back, in pieces.

Always true:
- The arithmetic is torch's own AdamW, where the weights are: a step ends with the bits of one whose
  moments stay on the GPU.
- Between two steps all moments are on the host, as `optimizer.state` has them; during one, the
  moments of two pieces at most are on the GPU as well.
- While a piece is updated the next one comes and the one before goes, each in a stream of its own:
  a step takes as long as the moments take in one direction.

The host's memory is pinned, since copies of other memory make everybody wait. torch rounds each
block of it up to a power of two, so pieces are filled to nearly one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""As large as the weights; AdamW's step counter is one number, and stays where it is."""
PIECE_BYTES = 2**32
"""Of moments, unless those of a single weight are more."""
_ALIGNED = 64
"""Numbers that each moment begins at a multiple of: kernels read several at once."""


@dataclass(frozen=True)
class Piece:
    """Weights whose moments travel together, in one flat tensor."""

    weights: Sequence[Tensor]
    host: Tensor

    def parts(self, flat: Tensor) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Each weight and moment with its part of a flat tensor."""
        at = 0
        for weight in self.weights:
            for moment in MOMENTS:
                yield weight, moment, flat[at : at + weight.numel()].view(weight.shape)
                at += _room(weight) // len(MOMENTS)


class MomentsOnHost:
    """The moments of an optimizer, which takes its steps through this alone."""

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        self._optimizer = optimizer
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._device: torch.device = weights[0].device
        self._on_gpu = self._device.type == "cuda"
        self._pieces = [
            Piece(some, _empty(some, pinned=self._on_gpu)) for some in _cut(weights, PIECE_BYTES)
        ]
        self._homes = {
            (weight, moment): home
            for piece in self._pieces
            for weight, moment, home in piece.parts(piece.host)
        }
        if self._on_gpu:
            self._coming = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._going = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def keep(self, weight: Tensor, moment: str, value: Tensor) -> None:
        """Go on with this moment, wherever it is now."""
        home = self._homes[weight, moment]
        self._optimizer.state[weight][moment] = home.copy_(value)

    def step(self) -> None:
        """One step of the optimizer; takes the gradients away, each as soon as it is used."""
        gradients: dict[Tensor, Tensor] = {}
        for piece in self._pieces:
            for weight in piece.weights:
                if weight.grad is not None:
                    gradients[weight], weight.grad = weight.grad, None
        if self._on_gpu:
            self._step_in_streams(gradients)
            return
        for piece in self._pieces:
            self._update(piece, piece.host, gradients)

    def _step_in_streams(self, gradients: dict[Tensor, Tensor]) -> None:
        now = torch.cuda.current_stream(self._device)
        largest = max((piece.host for piece in self._pieces), key=Tensor.numel)
        rooms = [torch.empty_like(largest, device=self._device) for _ in self._pieces[:2]]
        gone: list[torch.cuda.Event] = []
        self._coming.wait_stream(now)
        for number, piece in enumerate(self._pieces):
            room = rooms[number % 2][: piece.host.numel()]
            with torch.cuda.stream(self._coming):
                if number >= len(rooms):
                    self._coming.wait_event(gone[number - len(rooms)])
                room.copy_(piece.host, non_blocking=True)
            now.wait_stream(self._coming)
            self._update(piece, room, gradients)
            self._going.wait_stream(now)
            with torch.cuda.stream(self._going):
                piece.host.copy_(room, non_blocking=True)
            gone.append(self._going.record_event())
        # Whoever reads the moments next, such as for a checkpoint, does not ask the GPU.
        self._going.synchronize()

    def _update(self, piece: Piece, flat: Tensor, gradients: dict[Tensor, Tensor]) -> None:
        """A step of those weights of a piece that have a gradient, with its moments in `flat`."""
        state = self._optimizer.state
        learning = [weight for weight in piece.weights if weight in gradients]
        for weight in learning:
            weight.grad = gradients.pop(weight)
            if "step" not in state[weight]:
                # A counter as AdamW makes it: on the GPU, where its kernels read it.
                state[weight]["step"] = torch.zeros((), device=self._device)
        for weight, moment, part in piece.parts(flat):
            if weight.grad is not None:
                if moment not in state[weight]:
                    part.zero_()
                state[weight][moment] = part
        self._optimizer.step()
        for weight in learning:
            weight.grad = None
            state[weight] |= {moment: self._homes[weight, moment] for moment in MOMENTS}


def _cut(weights: Sequence[Tensor], piece_bytes: int) -> list[list[Tensor]]:
    """Into pieces, in their order."""
    assert len({weight.dtype for weight in weights}) == 1, "what learns is float32"
    pieces: list[list[Tensor]] = []
    left = 0
    for weight in weights:
        needed = _room(weight) * weight.element_size()
        if needed > left:
            pieces.append([])
            left = piece_bytes
        pieces[-1].append(weight)
        left -= needed
    return pieces


def _empty(weights: Sequence[Tensor], *, pinned: bool) -> Tensor:
    return torch.empty(sum(map(_room, weights)), dtype=weights[0].dtype, pin_memory=pinned)


def _room(weight: Tensor) -> int:
    """Numbers that a weight's moments take in a flat tensor."""
    return len(MOMENTS) * -(-weight.numel() // _ALIGNED) * _ALIGNED
