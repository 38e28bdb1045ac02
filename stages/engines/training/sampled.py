"""The weights that a sampler answers with: the learner's, merged with its adapter, rounded.

They are those that loading the folder gives which the learner would be saved to, bit by bit. Every
rank gets all of them, one at a time, wherever their parts are; nothing else is ever whole.

A rank that only samples has no learner: what it gets its weights from is `Elsewhere`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from stages.engines.models.lora import has_adapter, merged_parameters
from stages.engines.models.precision import is_rounded, rounded
from stages.engines.training.learner import AnyLearner
from stages.engines.training.saving import Beside, beside_sampled, hash_of_sampled

Form = tuple[str, torch.Size, torch.dtype]
"""A weight's name, shape and type."""


@dataclass(frozen=True)
class Outline:
    """What a rank without the model has to know of it."""

    forms: list[Form]
    """Of the weights that are sampled with, in the order in which they come."""
    beside: Beside


class Elsewhere:
    """A policy that learns on other ranks: as much of a learner as a sampler wants."""

    model = None
    lockstep = True
    outline: Outline
    """Of the weights that come next; whoever asks for these knows it."""

    def __init__(self, receive: Callable[[list[Form]], Iterator[tuple[str, Tensor]]]) -> None:
        self._receive = receive

    def computed_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._receive(self.outline.forms)

    @property
    def as_learner(self) -> AnyLearner:
        return cast(AnyLearner, self)


def outline_of(learner: AnyLearner) -> Outline:
    """All ranks that learn: it takes a pass over all weights."""
    forms = [(name, weight.shape, weight.dtype) for name, weight in sampled_weights(learner)]
    return Outline(forms, beside_sampled(learner.model, [name for name, _, _ in forms]))


def policy_hash(learner: AnyLearner, lines: Mapping[str, bytes]) -> str:
    """Of the policy, from the lines of all weights that were sampled with."""
    if isinstance(learner, Elsewhere):
        return hash_of_sampled(lines, learner.outline.beside)
    return hash_of_sampled(lines, beside_sampled(learner.model, lines))


def sampled_weights(learner: AnyLearner) -> Iterator[tuple[str, Tensor]]:
    """By the names of the plain model's parameters; all ranks.

    A tensor is good until the next one is asked for.
    """
    model = learner.model
    if not has_adapter(model):
        yield from learner.computed_weights()
        return
    for name, weight in merged_parameters(model, learner.full_weight):
        yield (
            name,
            rounded(weight, learner.precision) if is_rounded(model, name, weight) else weight,
        )
