"""RL state between iterations, beside the policy: steps, moments, KL controller, critic.

state/state.json               {"steps": optimizer steps over all iterations so far,
                                "kl_coef": what an adaptive KL coefficient has become, or null}
state/optimizer*.safetensors   moments as LEARNER/MOMENT.PARAMETER; absent after SFT
state/critic/                  a Hugging Face folder (PPO); absent after SFT
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stages.contracts.lora import LoraParams
from stages.data.artifacts import set_modes, write_json
from stages.engines.models.lora import carries_moments
from stages.engines.models.tensor_files import (
    StoredTensor,
    stored_tensors,
    tensor_file_names,
    write_tensor_files,
)
from stages.engines.processes.ranks import ALONE, Ranks
from stages.engines.training.learner import AnyLearner
from stages.engines.training.resume import tensors_of
from stages.engines.training.saving import md5, save_learner

OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class RlState:
    """The state folder in memory, without the critic."""

    steps: int
    kl_coef: float | None
    moments: Mapping[str, StoredTensor]
    """As LEARNER/MOMENT.PARAMETER."""

    def of(self, learner: str) -> dict[str, StoredTensor]:
        """What a learner takes of it."""
        prefix = f"{learner}/"
        return {
            f"moment.{name.removeprefix(prefix)}": moment
            for name, moment in self.moments.items()
            if name.startswith(prefix)
        }


def start_state(folder: Path) -> None:
    """The state that a policy starts RL with: no steps, no moments, no critic."""
    folder.mkdir()
    write_json(folder / "state.json", {"steps": 0, "kl_coef": None})


def load_state(folder: Path, lora: LoraParams, policy: Path) -> RlState:
    """The state beside the policy folder; moments of an adapter that does not go on are dropped."""
    values = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    there = any((folder / name).exists() for name in tensor_file_names(folder, OPTIMIZER))
    fits = there and carries_moments(lora, policy)
    moments = stored_tensors(folder, OPTIMIZER) if fits else {}
    return RlState(int(values["steps"]), values["kl_coef"], moments)


def save_state(
    folder: Path,
    steps: int,
    learners: Mapping[str, AnyLearner],
    *,
    kl_coef: float | None,
    lora: LoraParams,
    tokenizer_from: Path,
    ranks: Ranks = ALONE,
) -> dict[Path, str]:
    """All ranks call it. Returns the md5 of the files that were hashed on the way."""
    folder = ranks.same(folder)
    ranks.first_does(folder.mkdir)
    tensors = tensors_of(learners, "moment.")
    hashes = write_tensor_files(folder, OPTIMIZER, *tensors, ranks, new_hash=md5)
    known = {folder / name: digest for name, digest in hashes.items()}
    if "critic" in learners:
        critic = learners["critic"]
        known |= save_learner(
            critic, folder / "critic", tokenizer_from=tokenizer_from, lora=lora, ranks=ranks
        )
    if not ranks.rank:
        write_json(folder / "state.json", {"steps": steps, "kl_coef": kl_coef})
        set_modes(folder)
    return known
