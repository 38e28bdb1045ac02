"""What the slots and the requests of a decoder have come to, in tensors of the device.

A slot's row of the state says what it is to do next; results lie by request, so that a slot may be
given away without a copy. A decode step reads and writes these tensors and nothing else.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stages.engines.generation.drawing import GREEDY, add_supports, draw, uniforms
from stages.engines.generation.generator import Completion, Request, Sampling

TOKEN, LENGTH, COUNT, REQUEST, LIMIT = range(5)
"""Of a slot: the next input, tokens in its cache, tokens answered, the request (complemented when
it has ended), and how many tokens it may answer."""
NUM_FIELDS = 5
NEVER_USED = -(2**40)
NUM_ENDS = 8
"""Room for so many end tokens on the device."""


class Slots:
    """Room for `num_slots` sequences at a time, of `num_requests` in all."""

    def __init__(
        self, num_slots: int, num_requests: int, max_new_tokens: int, device: torch.device
    ) -> None:
        shape = (num_requests, max_new_tokens)
        self.device = device
        self.state = torch.zeros(num_slots, NUM_FIELDS, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.entropies = torch.zeros(num_requests, dtype=torch.float32, device=device)
        self.counts = torch.zeros(num_requests, dtype=torch.int32, device=device)
        self.uniforms = torch.zeros(shape, dtype=torch.float64, device=device)
        self.temperature = torch.ones(1, dtype=torch.float32, device=device)
        self.ends = torch.full((NUM_ENDS,), -1, dtype=torch.int32, device=device)
        self.supports: list[list[list[int]]] = []

    def fits(self, num_slots: int, num_requests: int, max_new_tokens: int) -> bool:
        return (
            len(self.state) == num_slots
            and num_requests <= self.tokens.shape[0]
            and max_new_tokens <= self.tokens.shape[1]
        )

    def begin(
        self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling, ends: list[int]
    ) -> None:
        """Forget the last requests; these are to be answered."""
        self._requests, self._limit, self._sampling = requests, max_new_tokens, sampling
        self._end_ids = frozenset(ends)
        self.state.zero_()
        self.state[:, REQUEST] = NEVER_USED
        self.entropies.zero_()
        self.counts.zero_()
        self.temperature.fill_(sampling.temperature)
        self.ends.fill_(-1)
        self.ends[: len(ends)] = torch.tensor(ends, dtype=torch.int32, device=self.device)
        self.supports = [[] for _ in requests]
        seeds = torch.tensor([request.seed or 0 for request in requests], device=self.device)
        greedy = torch.tensor([request.seed is None for request in requests], device=self.device)
        positions = torch.arange(max_new_tokens, device=self.device)
        drawn = uniforms(seeds[:, None], positions[None]).masked_fill(greedy[:, None], GREEDY)
        self.uniforms[: len(requests), :max_new_tokens] = drawn

    def admit(self, requests: Mapping[int, int]) -> None:
        """Begin a request in each of these slots; their caches are not its business."""
        rows = []
        for request in requests.values():
            ids = self._requests[request].prompt_ids
            limit = self._requests[request].limit(self._limit)
            rows.append([ids[-1], len(ids) - 1, 0, request, limit])
        self.state.index_copy_(0, self.sent(list(requests)), self.sent(rows))

    def move(self, targets: Mapping[int, int]) -> None:
        """The slots that they leave are free: a sequence is never decoded in two places."""
        sources = self.sent(list(targets))
        moved = self.state.index_select(0, sources)
        self.state.index_copy_(0, self.sent(list(targets.values())), moved)
        moved[:, REQUEST] = NEVER_USED
        self.state.index_copy_(0, sources, moved)

    def sent(self, values: list[int] | list[list[int]]) -> Tensor:
        """On the device, without waiting for it."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def record(self, logits: Tensor) -> None:
        """Draw a token for each of the first slots, and note what follows from it."""
        state = self.state[: len(logits)]
        busy = (state[:, REQUEST] >= 0).nonzero().squeeze(-1)
        of_busy = state[busy]
        request, count = of_busy[:, REQUEST], of_busy[:, COUNT]
        drawn = draw(logits[busy], self.uniforms[request, count], self._sampling)
        if drawn.kept is not None:
            add_supports([self.supports[i] for i in request.tolist()], drawn.kept)
        self.tokens[request, count] = drawn.tokens.int()
        self.logprobs[request, count] = drawn.logprobs
        self.entropies[request] += drawn.entropies
        self.counts[request] = (count + 1).int()
        ended = torch.isin(drawn.tokens, self.ends) | (count + 1 == of_busy[:, LIMIT])
        of_busy[:, TOKEN] = drawn.tokens
        of_busy[:, LENGTH] += 1
        of_busy[:, COUNT] += 1
        of_busy[:, REQUEST] = torch.where(ended, ~request, request)
        state[busy] = of_busy

    def completions(self) -> list[Completion]:
        """What all requests have come to."""
        num = len(self._requests)
        counts = self.counts[:num].tolist()
        width = max(counts, default=0)
        tokens = self.tokens[:num, :width].tolist()
        logprobs = self.logprobs[:num, :width].tolist()
        entropies = self.entropies[:num].tolist()
        return [
            Completion(
                ids=tokens[i][: counts[i]],
                logprobs=logprobs[i][: counts[i]],
                entropy=entropies[i],
                finish_reason="stop" if tokens[i][counts[i] - 1] in self._end_ids else "length",
                support=self.supports[i] if self._sampling.cuts else None,
            )
            for i in range(num)
        ]
