"""The spec of a stage: all that bears its identity, and all that crosses the planes.

The fingerprint is a hash over the spec. Equal fingerprints mean equal outputs, so a job is found
again by it after any death. How the job runs (threads, device, paths) is kept apart, in the
attempt's launch.json.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines.base import atomic
from pipelines.base.errors import LockstepError
from pipelines.identity.hashing import HashCache
from stages.contracts.catalog import BoundStage


@dataclass(frozen=True)
class Artifact:
    """A path relative to the repository, and what was there."""

    path: str
    hash: str


@dataclass(frozen=True)
class Spec:
    """What a stage computes."""

    stage: str
    """The address in DVC's spelling: `rollout@iter_001`."""
    name: str
    key: str | None
    config: dict[str, Any]
    code: str
    """The md5 of its code map."""
    inputs: dict[str, Artifact]
    outs: dict[str, str]
    metrics: str

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def write(self, path: Path) -> None:
        atomic.write_json(path, {**asdict(self), "fingerprint": self.fingerprint})

    @classmethod
    def read(cls, path: Path) -> "Spec":
        values = json.loads(path.read_text(encoding="utf-8"))
        values.pop("fingerprint")
        values["inputs"] = {name: Artifact(**item) for name, item in values["inputs"].items()}
        return cls(**values)


def make_spec(root: Path, bound: BoundStage, hashes: HashCache, code: str) -> Spec:
    """Fix a bound stage's identity: hash its inputs; `code` is the version of its code."""
    for name, path in bound.inputs.items():
        if not (root / path).exists():
            raise LockstepError(
                f"{bound.address}: its input `{name}` at {path} does not exist; "
                "run `dvc repro` so that the stages before it make it"
            )
    inputs = {path: hashes.of(root / path) for path in bound.inputs.values()}
    return spec_of(bound, code, inputs)


def spec_of(bound: BoundStage, code: str, inputs: Mapping[str, str]) -> Spec:
    """A bound stage with the version of its code and the hash of each path that it reads."""
    return Spec(
        stage=bound.address,
        name=bound.stage.name,
        key=bound.key,
        config=bound.config.values(bound.key),
        code=code,
        inputs={name: Artifact(path, inputs[path]) for name, path in bound.inputs.items()},
        outs=dict(bound.outs),
        metrics=bound.metrics,
    )
