"""Which learner a stage trains with: all in this process, or spread over the ranks."""

from typing import Any

from stages.context import Context, StageError
from stages.contracts.precision import Precision
from stages.contracts.sharding import Sharding
from stages.engines.forward.ulysses import share_rows
from stages.engines.models.precision import is_rounded
from stages.engines.processes.ranks import Ranks
from stages.engines.training.learner import AnyLearner, Optimization
from stages.engines.training.optimizer import Learner


def open_learner(ctx: Context, ranks: Ranks, model: Any, how: Optimization) -> AnyLearner:
    """A learner of the model; all ranks call it."""
    share_rows(ctx, ranks, model)
    if ctx.sharding is Sharding.NONE:
        return Learner(model, how, ctx.offload)
    if ctx.sharding is Sharding.FSDP:
        # Torch's part for it is slow to import.
        from stages.engines.training.fsdp import FsdpLearner

        return FsdpLearner(ctx, ranks, model, how)
    _check_all_are_rounded(ctx, model, how.precision)
    # DeepSpeed is an extra, and slow to import.
    from stages.engines.training.zero import ZeroLearner

    return ZeroLearner(ctx, ranks, model, how)


def _check_all_are_rounded(ctx: Context, model: Any, precision: Precision) -> None:
    """StageError where ZeRO, which has one type for all weights, would round one that must stay."""
    if precision is Precision.FLOAT32:
        return
    for name, parameter in model.named_parameters():
        if not is_rounded(model, name, parameter):
            raise StageError(
                f"sharding {ctx.sharding} in the profile, with precision {precision}: ZeRO would "
                f"round {name}, a weight that this model ({model.config.model_type}) computes with "
                "as it is; set sharding to fsdp or none, or precision to float32"
            )
