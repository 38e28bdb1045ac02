"""online: steps of rollout, score and policy update in one job, with everything resident.

`rl.online` names the policies that are made so. It is empty by default, and the graph then has no
such stage. Step n of the policy `fast` is the iteration `fast_00n`: it draws the prompts and the
random numbers that an iteration of this name would.
"""

from pydantic import Field

from stages.contracts.base import Over, Processes, Section, Stage
from stages.contracts.policy_update import POLICY_UPDATE, PolicyUpdateConfig
from stages.contracts.rollout import ROLLOUT, RolloutConfig
from stages.contracts.score import SCORE, ScoreConfig


class OnlineParams(Section):
    """How fused steps follow one another."""

    overlap: bool = False
    """Whether to sample a step's responses while the step before trains: off-policy by one."""


class OnlineConfig(RolloutConfig, ScoreConfig, PolicyUpdateConfig):
    """What online sees of params.yaml: all that the stages of an iteration see, and its own."""

    online: OnlineParams
    steps: int = Field(alias="rl.online.{key}.steps", ge=1)


def step_name(policy: str, step: int) -> str:
    """The iteration that a policy's step, counted from 1, is."""
    return f"{policy}_{step:03d}"


_MADE = ("rollouts", "scores")
"""What passes between the stages of an iteration never leaves this one but as a record."""

ONLINE = Stage(
    name="online",
    module="stages.online",
    config=OnlineConfig,
    inputs={
        name: path
        for stage in (ROLLOUT, SCORE, POLICY_UPDATE)
        for name, path in stage.inputs.items()
        if name not in _MADE
    },
    outs={**ROLLOUT.outs, **SCORE.outs, **POLICY_UPDATE.outs},
    metrics="metrics/iterations/{key}/online.json",
    over=Over.ONLINE,
    processes=Processes.TOGETHER,
)
