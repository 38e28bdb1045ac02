"""A policy of one weight, with as little history as there can be."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipelines.export.provenance import Provenance
from pipelines.identity.spec import Artifact
from pipelines.lineage.stage_run import StageRun

PATH = "artifacts/policies/iter_001/model"


def write_policy(folder: Path, weights: str = "model.safetensors") -> Provenance:
    """Its files are written, and it was not evaluated."""
    folder.mkdir(parents=True)
    save_file({"weight": torch.ones(2)}, folder / weights)
    (folder / "config.json").write_text("{}")
    stage_run = StageRun("policy_update@iter_001", {}, {}, {}, {PATH: "0" * 32})
    nothing: dict[str, Any] = {key: {} for key in ("params", "evaluation", "of_sft", "data")}
    return Provenance(
        policy="iter_001",
        artifact=Artifact(PATH, "0" * 32),
        stage_run=stage_run,
        files={path.name: path for path in sorted(folder.iterdir())},
        stages=(stage_run,),
        given=(),
        sources=(),
        base_card={},
        licences={},
        **nothing,
    )
