"""What a stage promises, in a form that both planes can import: no torch, no dvc.

A `Stage` names its inputs, outputs and the params that bear its identity. Paths are templates over
the stage's *binding*: `key` (the policy that is made or evaluated, or the reward source), `policy`
(the one it starts from), `reward` (the reward source that policies learn from) and `correct` (the
one that says what is right). dvc.yaml says the same in DVC's own words, and a test holds the two
together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A mapping in params.yaml or a profile: unknown keys and wrong types are errors."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        populate_by_name=True,
        allow_inf_nan=False,
        # Every command imports all of these, and uses few.
        defer_build=True,
    )


class StageConfig(Section):
    """The part of params.yaml that one stage sees.

    Each field is one tracked param: its alias (or its name, where they agree) is the dotted key in
    params.yaml, in which `{key}` stands for the policy that is made. What is not a field here
    cannot change what the stage computes.
    """

    @classmethod
    def param_keys(cls, policy: str = "{key}") -> list[str]:
        return [_key(info.alias or name, policy) for name, info in cls.model_fields.items()]

    @classmethod
    def from_params(cls, params: BaseModel, policy: str | None = None) -> "StageConfig":
        """Pick this stage's fields out of the whole, validated params."""
        keys = cls.param_keys(policy or "")
        return cls.from_values({key: _lookup(params, key) for key in keys}, policy)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], policy: str | None) -> "StageConfig":
        """The config whose `values()` these are."""
        names = zip(cls.param_keys(policy or ""), cls.param_keys(), strict=True)
        spelt = dict(names)
        return cls.model_validate({spelt.get(key, key): value for key, value in values.items()})

    def values(self, policy: str | None) -> dict[str, Any]:
        """As JSON, by the dotted keys of params.yaml."""
        dumped = self.model_dump(mode="json", by_alias=True)
        return {_key(key, policy or ""): value for key, value in dumped.items()}


def _key(template: str, policy: str) -> str:
    return template.replace("{key}", policy)


def _lookup(params: BaseModel, dotted: str) -> Any:
    value: Any = params
    for part in dotted.split("."):
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return value


class Over(StrEnum):
    """What a stage is repeated over."""

    ONCE = "once"
    ITERATIONS = "iterations"
    """Over `rl.iterations`."""
    PREFERENCES = "preferences"
    """Over `rl.preferences`."""
    ONLINE = "online"
    """Over `rl.online`."""
    REWARDS = "rewards"
    """Over `rewards`."""


class Processes(StrEnum):
    """How many processes may work at one stage, and how they do."""

    ONE = "one"
    TOGETHER = "together"
    """As ranks that meet in collectives at every step; rank 0 writes."""
    SHARDS = "shards"
    """Each on its own units of work; whoever finds all of them done writes."""


@dataclass(frozen=True)
class Stage:
    """One node of the graph, or one family of nodes when it is repeated over policies."""

    name: str
    """The stage's name in dvc.yaml, without `@policy`."""
    module: str
    """The module whose `run(config, inputs, out, ctx)` computes it."""
    config: type[StageConfig]
    inputs: Mapping[str, str]
    outs: Mapping[str, str]
    metrics: str
    """Where its summary metrics go: a small JSON file that DVC compares."""
    over: Over = Over.ONCE
    binding: Mapping[str, str] = field(default_factory=dict)
    """Fixed values for the path templates, where the stage is not repeated."""
    processes: Processes = Processes.ONE
    reads: bool = False
    """Whether it only reads models, which several processes may hold together: as ranks, then."""
    wants_graph: bool = False
    """Whether the spec carries the hashes of the whole graph upstream, for the report."""
