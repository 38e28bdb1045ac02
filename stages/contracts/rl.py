"""rl: which algorithm, which reward, and the family tree of policies."""

from enum import StrEnum

from pydantic import Field, field_validator, model_validator

from stages.contracts.base import Section
from stages.contracts.family import family_tree, refuse_odd_names


class Algorithm(StrEnum):
    """The RL algorithm."""

    PPO = "ppo"
    """A critic and GAE."""
    GRPO = "grpo"
    """Against the mean of the group, over its spread."""
    RLOO = "rloo"
    """Against the mean of the others in the group."""
    REINFORCE = "reinforce"
    """The return itself."""
    REINFORCE_PP = "reinforce_pp"
    """REINFORCE++: returns of each token, whitened over the whole rollout batch."""
    REINFORCE_PP_BASELINE = "reinforce_pp_baseline"
    """The same after the group's mean is taken off."""
    REMAX = "remax"
    """Against the reward of the greedy response."""
    DPO = "dpo"
    """Iterated DPO: pairs of the policy's own responses, or of its responses and demonstrations."""
    BEST_OF_N = "best_of_n"
    """Rejection sampling: SFT on the best responses."""
    DISTILL = "distill"
    """On-policy distillation: towards a teacher on the policy's own responses."""

    @property
    def has_groups(self) -> bool:
        """Whether responses to one prompt are compared, so that there must be several."""
        return self in (
            Algorithm.GRPO,
            Algorithm.RLOO,
            Algorithm.REINFORCE_PP_BASELINE,
            Algorithm.BEST_OF_N,
        )

    @property
    def is_policy_gradient(self) -> bool:
        """Whether it ascends `policy_update.objective` of an advantage that comes from rewards."""
        return self not in (Algorithm.DPO, Algorithm.BEST_OF_N, Algorithm.DISTILL)


class Reward(StrEnum):
    """The sources of rewards that are there without being named in `rewards`."""

    REWARD_MODEL = "reward_model"
    VERIFIER = "verifier"


class TurnCredit(StrEnum):
    """Which tokens an environment's rewards are paid to."""

    EPISODE = "episode"
    """Their sum, to the last token of the episode."""
    TURN = "turn"
    """Each, to the last token of the turn that earned it."""


class Start(Section):
    """A node in the family tree of policies."""

    policy: str
    """The policy that this one starts from: `sft` or one above it."""


class Fused(Start):
    """A policy that is made by steps in one job."""

    steps: int = Field(ge=1)
    """Steps of rollout, score and policy update."""


class RlParams(Section):
    """The reinforcement-learning loop."""

    algorithm: Algorithm = Field(default=Algorithm.PPO, strict=False)
    """How policies learn from their rollouts; docs/algorithms.md describes each."""
    reward: str = Reward.REWARD_MODEL.value
    """`reward_model`: the trained one. `verifier`: 1 for a right answer. Or a name in `rewards`."""
    turn_credit: TurnCredit = Field(default=TurnCredit.EPISODE, strict=False)
    """Rewards of an environment: to the whole `episode`, or each to its `turn`."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """Discount per turn, besides `policy_update.gamma` per token (`turn_credit: turn`)."""
    teacher: str = "models"
    """Hugging Face folder of the policy that `distill` learns from; it shares the tokenizer."""
    iterations: dict[str, Start] = Field(
        default_factory=lambda: {
            "iter_001": Start(policy="sft"),
            "iter_002": Start(policy="iter_001"),
            "iter_003": Start(policy="iter_002"),
        }
    )
    """Name of each iteration, and the policy it starts from; add a line to run one more."""

    preferences: dict[str, Start] = Field(default_factory=dict)
    """Policies that learn from preferences directly, each with its start and reference."""

    online: dict[str, Fused] = Field(default_factory=dict)
    """Policies made by fused steps: each with its start and number of steps; see docs/online.md."""

    _names_are_words = field_validator("iterations", "preferences", "online", mode="before")(
        refuse_odd_names
    )

    @property
    def family(self) -> dict[str, str]:
        """Each policy and the one it starts from, parents first."""
        return family_tree(
            {name: start.policy for name, start in self.preferences.items()},
            {name: start.policy for name, start in self.iterations.items()},
            {name: start.policy for name, start in self.online.items()},
        )

    @model_validator(mode="after")
    def _is_a_tree(self) -> "RlParams":
        _ = self.family
        return self
