"""Forward passes of scalar heads (reward models, critics): one value per token."""

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from stages.data.batching import Batch
from stages.engines.forward.packed import hidden_states, take
from stages.engines.models.lora import unwrapped


def token_scores(model: Any, batch: Batch) -> Tensor:
    """[B, L] the head's value at every token."""
    scores = _packed_scores(model, batch)
    spread = scores.new_zeros(batch.ids.numel()).index_copy(0, batch.packed.at, scores)
    return spread.view(batch.ids.shape)


def response_values(critic: Any, batch: Batch) -> Tensor:
    """[B, T] the critic's value before each learnt token."""
    packed, shape = batch.packed, batch.response_mask.shape
    values = take(_packed_scores(critic, batch), packed.predicting)
    return values.new_zeros(shape.numel()).index_copy(0, packed.responding, values).view(shape)


def sequence_rewards(reward_model: Any, batch: Batch) -> Tensor:
    """[B] the reward of each response: the head's value at its last token."""
    return token_scores(reward_model, batch).gather(1, batch.last[:, None]).squeeze(1)


def _packed_scores(model: Any, batch: Batch) -> Tensor:
    """[N] the head's value at every token, as in `batch.packed`."""
    hidden = hidden_states(model, batch)
    head = unwrapped(model).score
    weights = {name: value.float() for name, value in head.named_parameters()}
    if hidden.dtype in (torch.float16, torch.bfloat16):
        # A reward that is rounded to 16 bits has two or three digits.
        scores: Tensor = functional_call(head, weights, hidden.float())
    else:
        scores = head(hidden)
    return scores.squeeze(-1)
