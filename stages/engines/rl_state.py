"""What one RL iteration leaves for the next beside the policy: steps, AdamW's moments, the critic.

state/state.json               {"steps": optimizer steps over all iterations so far}
state/optimizer.safetensors    moments as LEARNER/MOMENT.PARAMETER; absent after SFT
state/critic/                  a Hugging Face folder (PPO); absent after SFT
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.contracts.rl import Reward
from stages.data.artifacts import set_modes, write_json
from stages.engines.models import load_scalar_model, save_model, start_scalar_model
from stages.engines.optimizer import Learner


@dataclass(frozen=True)
class RlState:
    """The state folder in memory, without the critic."""

    steps: int
    tensors: Mapping[str, Tensor]

    def moments(self, learner: str) -> dict[str, Tensor]:
        prefix = f"{learner}/"
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}


def load_state(folder: Path) -> RlState:
    steps = int(json.loads((folder / "state.json").read_text())["steps"])
    path = folder / "optimizer.safetensors"
    return RlState(steps, load_file(path) if path.exists() else {})


def load_critic(inputs: Mapping[str, Path], reward: Reward, device: str) -> Any:
    """The critic of the iteration before; else the reward model, or the policy's backbone."""
    previous = inputs["state"] / "critic"
    if previous.exists():
        return load_scalar_model(previous, device)
    if reward is Reward.REWARD_MODEL:
        return load_scalar_model(inputs["reward"], device)
    return start_scalar_model(inputs["policy"], device)


def save_state(
    folder: Path, steps: int, learners: Mapping[str, Learner], *, tokenizer_from: Path
) -> None:
    folder.mkdir()
    write_json(folder / "state.json", {"steps": steps})
    tensors = {
        f"{name}/{key}": tensor.contiguous()
        for name, learner in learners.items()
        for key, tensor in learner.moments().items()
    }
    save_file(tensors, folder / "optimizer.safetensors")
    if "critic" in learners:
        save_model(learners["critic"].model, folder / "critic", tokenizer_from=tokenizer_from)
    set_modes(folder)
