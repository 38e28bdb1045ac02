"""The torch generator, watched while it decodes: each token is told when it is drawn.

What decodes is the generator's own code, which this only looks at from outside. So the tokens that
are told are those that it returns, whatever the family and the way of decoding.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stages.contracts.precision import Precision
from stages.engines.generation.decoding import Look, decode
from stages.engines.generation.generator import Completion, Request, Sampling
from stages.engines.generation.llama.decoder import LlamaDecoder
from stages.engines.generation.padded import generate as generate_padded
from stages.engines.generation.torch_generator import TorchGenerator

Tell = Callable[[list[int]], None]
"""Hears all ids of the answer so far; what it raises ends the answer."""


class StreamingGenerator(TorchGenerator):
    """Answers one request at a time."""

    def __init__(self, device: str, precision: Precision) -> None:
        super().__init__(device, precision, slots=1)
        self._tell: Tell = _nobody

    def stream(
        self, request: Request, *, max_new_tokens: int, sampling: Sampling, tell: Tell
    ) -> Completion:
        """The answer, of which `tell` has heard all tokens when this returns."""
        self._tell = tell
        try:
            [answer] = self.generate([request], max_new_tokens=max_new_tokens, sampling=sampling)
        finally:
            self._tell = _nobody
        tell(answer.ids)
        return answer

    def _generate(
        self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling
    ) -> list[Completion]:
        if self._decoder is None:
            policy = _WatchedPolicy(self._model, self._tell)
            return generate_padded(
                policy, requests, max_new_tokens=max_new_tokens, sampling=sampling
            )
        self._decoder.begin(requests, max_new_tokens, sampling)
        decode(_WatchedDecoder(self._decoder, self._tell), requests, max_new_tokens)
        return self._decoder.completions()


class _WatchedDecoder:
    """A decoder with one sequence, whose tokens lie on its board."""

    def __init__(self, decoder: LlamaDecoder, tell: Tell) -> None:
        self.slots = decoder.slots
        self.steps_a_look = decoder.steps_a_look
        self.looks_late = decoder.looks_late
        self._decoder = decoder
        self._tell = tell

    def rows_for(self, num_slots: int) -> int:
        return self._decoder.rows_for(num_slots)

    def admit(self, requests: Mapping[int, int]) -> None:
        self._decoder.admit(requests)

    def move(self, targets: Mapping[int, int]) -> None:
        self._decoder.move(targets)

    def advance(self, num_rows: int, num_steps: int) -> None:
        self._decoder.advance(num_rows, num_steps)
        board = self._decoder.board
        self._tell(board.tokens[0, : int(board.counts[0])].tolist())

    def look(self) -> Look:
        return self._decoder.look()


class _WatchedPolicy:
    """A model in whose passes, but for the first, the token that was drawn last goes in."""

    def __init__(self, policy: Any, tell: Tell) -> None:
        self._policy = policy
        self._tell = tell
        self._ids: list[int] = []

    def __call__(self, *, input_ids: Any, past_key_values: Any, **options: Any) -> Any:
        if past_key_values is not None:
            self._ids += input_ids[0].tolist()
            self._tell(list(self._ids))
        return self._policy(input_ids=input_ids, past_key_values=past_key_values, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def _nobody(_: list[int]) -> None:
    """Hears nothing."""
