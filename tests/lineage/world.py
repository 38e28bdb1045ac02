"""Makings and evidence by hand, for the logic that needs no pipeline."""

from collections.abc import Mapping
from typing import Any

from pipelines.lineage.evidence import Artifact, Evidence
from pipelines.lineage.making import Job, Lock, Making
from pipelines.lineage.target import Target

HERE = {"cpu": "Neoverse", "threads": "1", "host": "a", "packages": {"torch": "2.13.0"}}


def digest(text: str) -> str:
    """A hash that says what it stands for."""
    return text.encode().hex().ljust(32, "0")[:32]


def making(
    stage: str,
    inputs: Mapping[str, str],
    outs: Mapping[str, str],
    *,
    params: Mapping[str, Any] | None = None,
    code: Mapping[str, str] | None = None,
    environment: Mapping[str, Any] | None = HERE,
) -> Making:
    job = Job("entry", "published", "c0ffee", environment=environment or {}, ended=1.0)
    return Making(
        stage=stage,
        params=params or {"seed": 17},
        inputs=inputs,
        code=code or {"stages/x.py": "1"},
        outs=outs,
        jobs=(job,) if environment is not None else (),
        in_workspace=True,
    )


def lock(name: str, *makings: Making) -> Lock:
    return Lock(name, 0.0, {item.stage: item for item in makings})


def evidence(*locks: Lock, more: tuple[Making, ...] = ()) -> Evidence:
    """The first lock is the workspace's."""
    found = {id(item): item for each in locks for item in each.stages.values()}
    return Evidence(
        [*found.values(), *more],
        locks[0] if locks else None,
        {each.name: each for each in locks[1:]},
    )


def target(made: Making, path: str | None = None, inside: Lock | None = None) -> Target:
    artifact = Artifact(path, made.outs[path]) if path else None
    return Target(path or made.stage, artifact, made, inside)


def chain(
    *, learning_rate: float = 0.1, data: str = "d", mark: str = "", **changes: Any
) -> tuple[Making, Making, Making]:
    """prepare, sft and an evaluation; `mark` makes the outputs of sft and what follows others."""
    prepare = making(
        "prepare",
        {"data": digest(f"data{data}")},
        {"artifacts/data/demonstrations.parquet": digest(f"demo{data}")},
    )
    sft = making(
        "sft",
        dict(prepare.outs),
        {"artifacts/policies/sft/model": digest(f"model{data}{learning_rate}{mark}")},
        params={"seed": 17, "sft.learning_rate": learning_rate},
        **changes,
    )
    evaluation = making(
        "evaluate_sft",
        dict(sft.outs),
        {"artifacts/evaluations/sft": digest(f"eval{data}{learning_rate}{mark}")},
    )
    return prepare, sft, evaluation
