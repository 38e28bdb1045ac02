"""The weights that a sampler answers with: the learner's, merged with its adapter, rounded.

They are those that loading the folder gives which the learner would be saved to, bit by bit. Every
rank gets all of them, one at a time, wherever their parts are; nothing else is ever whole.
"""

from collections.abc import Iterator

from torch import Tensor

from stages.engines.models.lora import has_adapter, merged_parameters
from stages.engines.models.precision import is_rounded, rounded
from stages.engines.training.learner import AnyLearner


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
