"""RL state between iterations, beside the policy: steps, moments, KL controller, critic.

state/state.json               {"steps": optimizer steps over all iterations so far,
                                "kl_coef": what an adaptive KL coefficient has become, or null}
state/optimizer.safetensors    moments as LEARNER/MOMENT.PARAMETER; absent after SFT
state/critic/                  a Hugging Face folder (PPO); absent after SFT
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.contracts.lora import LoraParams
from stages.data.artifacts import set_modes, write_json
from stages.engines.models.folders import save_model
from stages.engines.models.lora import carries_moments
from stages.engines.training.learner import AnyLearner


@dataclass(frozen=True)
class RlState:
    """The state folder in memory, without the critic."""

    steps: int
    kl_coef: float | None
    tensors: Mapping[str, Tensor]

    def moments(self, learner: str) -> dict[str, Tensor]:
        prefix = f"{learner}/"
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}


def start_state(folder: Path) -> None:
    """The state that a policy starts RL with: no steps, no moments, no critic."""
    folder.mkdir()
    write_json(folder / "state.json", {"steps": 0, "kl_coef": None})


def load_state(folder: Path, lora: LoraParams, policy: Path) -> RlState:
    """The state beside the policy folder; moments of an adapter that does not go on are dropped."""
    values = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    path = folder / "optimizer.safetensors"
    fits = path.exists() and carries_moments(lora, policy)
    return RlState(int(values["steps"]), values["kl_coef"], load_file(path) if fits else {})


def save_state(
    folder: Path,
    steps: int,
    learners: Mapping[str, AnyLearner],
    *,
    kl_coef: float | None,
    lora: LoraParams,
    tokenizer_from: Path,
) -> None:
    folder.mkdir()
    write_json(folder / "state.json", {"steps": steps, "kl_coef": kl_coef})
    tensors = {
        f"{name}/{key}": tensor.contiguous()
        for name, learner in learners.items()
        for key, tensor in learner.moments().items()
    }
    save_file(tensors, folder / "optimizer.safetensors")
    if "critic" in learners:
        with learners["critic"].full_precision() as critic:
            save_model(critic, folder / "critic", tokenizer_from=tokenizer_from, lora=lora)
    set_modes(folder)
