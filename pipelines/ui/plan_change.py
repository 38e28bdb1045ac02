"""What a change of params would cost, for the Compare page: `lockstep plan -S` as values."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines.identity.code import CODE_STAGE
from pipelines.runs.forecast import forecast

TARGETS = ["report"]
"""As `lockstep plan` has it where none are named."""


@dataclass(frozen=True)
class StaleStage:
    address: str
    how: str
    """update, run or restore; only what runs is a job."""
    reasons: tuple[str, ...]
    memory: str
    seconds: float | None
    """What it took the last time; None where that is not recorded, or nothing is computed."""
    gpus: int
    like: str
    """Which stage took so long, where it was not this one."""


@dataclass(frozen=True)
class PlannedChange:
    settings: tuple[str, ...]
    profile: str
    num_up_to_date: int
    stages: tuple[StaleStage, ...]
    problems: tuple[str, ...]
    """What does not fit its memory, or cannot be told."""

    def as_json(self) -> dict[str, Any]:
        known = [stage for stage in self.stages if stage.seconds is not None]
        return {
            **asdict(self),
            "seconds": sum(stage.seconds or 0.0 for stage in known),
            "gpu_seconds": sum((stage.seconds or 0.0) * stage.gpus for stage in known),
            "num_unknown": sum(stage.how == "run" for stage in self.stages) - len(known),
        }


def plan_change(root: Path, settings: list[str], profile: str | None) -> PlannedChange:
    """Nothing runs and nothing is written; LockstepError names a setting that is wrong."""
    found = forecast(root, TARGETS, profile, settings)
    stages = []
    for stage in found.stale:
        how = "update" if stage.address == CODE_STAGE else "restore" if stage.cached else "run"
        last = found.times.get(stage.address)
        stages.append(
            StaleStage(
                address=stage.address,
                how=how,
                reasons=tuple(stage.reasons),
                memory=str(found.memory[stage.address.split("@")[0]] or ""),
                seconds=last.seconds if last else None,
                gpus=last.gpus if last else 0,
                like=last.stage if last and last.stage != stage.address else "",
            )
        )
    unknown = [found.unknown] if found.unknown and stages else []
    up_to_date = len(found.planned) - len(stages)
    problems = (*found.unfit, *unknown)
    return PlannedChange(tuple(settings), found.profile, up_to_date, tuple(stages), problems)
