"""Decoding with a Llama-like model: a static cache, prefill, and the decode step.

The step is the same on every device but for its arithmetic: plain torch on the CPU, Triton kernels
in CUDA graphs on a GPU (cuda_graphs.py). Everything is in the type of the weights but for the
logits, which are float32.
"""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.context import StageError
from stages.engines.generation.decoding import Look
from stages.engines.generation.generator import Completion, Request, Sampling
from stages.engines.generation.llama import torch_ops
from stages.engines.generation.llama.slots import NUM_ENDS, REQUEST, TOKEN, Slots
from stages.engines.generation.llama.weights import Layer, Weights, read_weights, renew, rope_tables
from stages.engines.models.folders import end_ids

PREFILL_TOKENS = 16_384
"""Prompt tokens, padding included, in one forward pass."""
CACHE_BLOCK = 64
"""The cache's length is a multiple of this, so that it seldom has to be made anew."""
ROW_STEP = 16
"""On the CPU a step computes whole 16ths of the slots."""


class LlamaDecoder:
    """Slots over a model's weights; `prepare` before the first use."""

    steps_a_look = 1
    looks_late = 0
    ops: ModuleType = torch_ops

    def __init__(self, model: Any, slots: int) -> None:
        self.model = model
        self.slots = slots
        self.weights: Weights = read_weights(model)
        self.device: torch.device = self.weights.embedding.device
        self._board: Slots | None = None
        self._length = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    @property
    def board(self) -> Slots:
        assert self._board is not None, "prepare comes first"
        return self._board

    def renew(self) -> None:
        """The model's weights have changed in their places."""
        renew(self.weights, self.model)

    def begin(self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling) -> None:
        """Make room for these requests, and note them."""
        ends = sorted(end_ids(self.model) | set(sampling.stop_ids))
        if len(ends) > NUM_ENDS:
            named = ", ".join(map(str, ends))
            raise StageError(
                f"{len(ends)} tokens end a response ({named}), by the eos_token_id of the policy's "
                f"config.json and generation_config.json and the environment's `stops`, and the "
                f"torch generator decodes up to {NUM_ENDS}: remove those that are never sampled, "
                "or set rollout.engine: vllm"
            )
        room = (self.slots, len(requests), max_new_tokens)
        if self._board is None or not self._board.fits(*room):
            self.forget_steps()
            self._board = Slots(*room, self.device)
        longest = max(len(each.prompt_ids) + each.limit(max_new_tokens) for each in requests)
        if longest > self._length:
            self.forget_steps()
            self._make_cache(-(-longest // CACHE_BLOCK) * CACHE_BLOCK)
        self._requests = requests
        self.sampling = sampling
        self.board.begin(requests, max_new_tokens, sampling, ends)

    def forget_steps(self) -> None:
        """Whatever was recorded of a step uses tensors that are about to go."""

    def rows_for(self, num_slots: int) -> int:
        step = -(-self.slots // ROW_STEP)
        return min(self.slots, -(-num_slots // step) * step)

    def admit(self, requests: Mapping[int, int]) -> None:
        prompts: dict[tuple[int, ...], list[int]] = {}
        for slot, request in requests.items():
            prompts.setdefault(tuple(self._requests[request].prompt_ids[:-1]), []).append(slot)
        prompts.pop((), None)
        group: list[tuple[int, ...]] = []
        for prompt in sorted(prompts, key=len, reverse=True):
            if group and len(group[0]) * (len(group) + 1) > PREFILL_TOKENS:
                self._prefill({each: prompts[each] for each in group})
                group = []
            group.append(prompt)
        if group:
            self._prefill({each: prompts[each] for each in group})
        self.board.admit(requests)

    def move(self, targets: Mapping[int, int]) -> None:
        sources, places = (self.board.sent(list(part)) for part in (targets, targets.values()))
        for cache in (*self._keys, *self._values):
            cache.index_copy_(0, places, cache.index_select(0, sources))
        self.board.move(targets)

    def advance(self, num_rows: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self.board.record(self.logits(num_rows))

    def look(self) -> Look:
        return self.board.state[:, REQUEST].tolist

    def completions(self) -> list[Completion]:
        return self.board.completions()

    def logits(self, num_rows: int) -> Tensor:
        """[R, V] float32: what the first slots say next; their inputs enter the cache."""
        weights, shape = self.weights, self.weights.shape
        state = self.board.state[:num_rows]
        attend = self.ops.attention(state, shape, self._cos, self._sin)
        x = F.embedding(state[:, TOKEN], weights.embedding)
        for layer, keys, values in zip(weights.layers, self._keys, self._values, strict=True):
            y = self.ops.rms_norm(x, layer.attention_norm, shape.norm_eps)
            mixed = attend(F.linear(y, layer.qkv, layer.qkv_bias), layer, keys, values)
            x = self._rest_of_layer(x, mixed, layer)
        return _float_logits(self.ops.rms_norm(x, weights.norm, shape.norm_eps), weights.head)

    def _rest_of_layer(self, x: Tensor, mixed: Tensor, layer: Layer) -> Tensor:
        x = _added(x, mixed, layer.o, layer.o_bias)
        y = self.ops.rms_norm(x, layer.mlp_norm, self.weights.shape.norm_eps)
        hidden = self.ops.swiglu(F.linear(y, layer.gate_up, layer.gate_up_bias))
        return _added(x, hidden, layer.down, layer.down_bias)

    def _prefill(self, prompts: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        """Write the prompts' keys and values into the cache of all slots that begin with them.

        Padding is on the right, where no real token looks; decoding writes over what it leaves.
        """
        weights, shape = self.weights, self.weights.shape
        width = max(map(len, prompts))
        ids = self.board.sent([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        slots = self.board.sent([slot for slots in prompts.values() for slot in slots])
        prompt_of = self.board.sent(
            [index for index, slots in enumerate(prompts.values()) for _ in slots]
        )
        enter = self.ops.prompts(shape, self._cos, self._sin, slots, prompt_of)
        x = F.embedding(ids, weights.embedding).flatten(0, 1)
        for layer, keys, values in zip(weights.layers, self._keys, self._values, strict=True):
            y = self.ops.rms_norm(x, layer.attention_norm, shape.norm_eps)
            qkv = F.linear(y, layer.qkv, layer.qkv_bias).view(*ids.shape, -1)
            q, k, v = enter(qkv, layer, keys, values)
            if layer is weights.layers[-1]:
                return  # nothing is predicted here: the last layer's output has no use
            mixed = _causal(q, k, v)
            x = self._rest_of_layer(x, mixed.transpose(1, 2).reshape(x.shape[0], -1), layer)

    def _make_cache(self, length: int) -> None:
        self._keys, self._values = [], []
        shape, dtype = self.weights.shape, self.weights.embedding.dtype
        size = (self.slots, shape.num_kv_heads, length, shape.head_dim)
        try:
            for cache in (self._keys, self._values):
                for _ in range(shape.num_layers):
                    cache.append(torch.zeros(size, dtype=dtype, device=self.device))
        except torch.OutOfMemoryError as error:
            self._keys, self._values = [], []
            total = 2 * shape.num_layers * dtype.itemsize * torch.Size(size).numel()
            raise StageError(
                f"the cache of {self.slots} sequences of {length} tokens needs "
                f"{total / 2**30:.1f} GiB, which the GPU does not have: lower rollout.batch_size"
            ) from error
        self._length = length
        self._cos, self._sin = rope_tables(self.model, length)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [B, heads, L, D]; several query heads may share a key/value head."""
    shared = q.shape[1] // k.shape[1]
    fused = q.device.type == "cuda" and q.dtype != torch.float32
    if shared > 1 and not fused:
        # What shares heads without a copy is, for float32, what holds all L x L scores at once.
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared > 1 and fused)


def _added(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x + linear(y), into x."""
    if bias is not None:
        x = x + bias
    return x.addmm_(y, weight.t())


def _float_logits(x: Tensor, head: Tensor) -> Tensor:
    if x.dtype == torch.float32 or x.device.type != "cuda":
        return F.linear(x, head).float()
    # The sums in float32, not rounded to 16 bits: the trainer's are rounded in other places.
    return torch.mm(x, head.t(), out_dtype=torch.float32)
