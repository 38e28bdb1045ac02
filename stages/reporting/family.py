"""The family tree of policies: `sft` at the root, one node for each policy.

A tree is drawn as branches. The branch of the final policy runs from the root to it; every other
leaf's branch begins where it leaves a branch drawn before, so each step is drawn once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

ROOT = "sft"


@dataclass(frozen=True)
class Branch:
    leaf: str
    policies: tuple[str, ...]
    """From the fork (or the root) to the leaf."""


@dataclass(frozen=True)
class Family:
    parents: Mapping[str, str]
    """Each policy and the one that it starts from, parents first."""
    preferences: frozenset[str] = frozenset()
    """Those that learnt from preferences directly."""
    online: frozenset[str] = frozenset()
    """Those that were made by fused steps; the others are iterations."""

    @property
    def policies(self) -> list[str]:
        return [ROOT, *self.parents]

    @property
    def final(self) -> str:
        """The last that params.yaml names; nothing can start from it, so it is a leaf."""
        return list(self.parents)[-1]

    def path(self, policy: str) -> list[str]:
        """From the root to the policy."""
        steps = [policy]
        while steps[-1] != ROOT:
            steps.append(self.parents[steps[-1]])
        return steps[::-1]

    def depth(self, policy: str) -> int:
        """How many iterations of training the policy has behind it, after SFT."""
        return len(self.path(policy)) - 1

    def branches(self) -> list[Branch]:
        """One branch for each leaf, the final policy's first."""
        inner = set(self.parents.values())
        leaves = [self.final, *(p for p in self.parents if p not in inner and p != self.final)]
        drawn: set[str] = set()
        branches = []
        for leaf in leaves:
            path = self.path(leaf)
            fork = max((i for i, policy in enumerate(path) if policy in drawn), default=0)
            branches.append(Branch(leaf, tuple(path[fork:])))
            drawn.update(path)
        return branches
