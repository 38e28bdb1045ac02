"""The choice of a generator: by device and size, or named in params."""

import math
from contextlib import AbstractContextManager, closing
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from safetensors import safe_open

from stages.context import Context, StageError
from stages.contracts.precision import Precision
from stages.contracts.rollout import Engine
from stages.engines.generation.generator import Generator, GeneratorSettings
from stages.engines.generation.torch_generator import TorchGenerator

TORCH_WEIGHTS = 3_000_000_000
"""Up to so many weights one GPU is kept busy by the torch generator."""


def open_generator(folder: Path, engine: Engine, settings: GeneratorSettings) -> Generator:
    """A generator with the weights of a folder, to be closed."""
    if choose(folder, settings.device, engine) is Engine.VLLM:
        if settings.group is not None and not settings.group.leads:
            from stages.engines.generation.vllm_start import NodeWorkers

            # As much of one as a rank has that answers nothing.
            return cast(Generator, NodeWorkers(folder, settings))
        from stages.engines.generation.vllm_generator import VllmGenerator

        return VllmGenerator(folder, settings)
    generator = torch_generator(settings)
    generator.load(folder)
    return generator


def torch_generator(settings: GeneratorSettings) -> TorchGenerator:
    """One without weights; StageError where it would have to span ranks."""
    if settings.group is not None:
        raise StageError(
            f"tensor_parallel in the profile is {settings.tensor_parallel}, and the torch "
            "generator, which rollout.engine chooses here, has one GPU: set rollout.engine: vllm, "
            "or tensor_parallel: 1"
        )
    return TorchGenerator(settings.device, settings.precision, settings.slots)


def opened(
    ctx: Context, folder: Path, engine: Engine, precision: Precision, slots: int, longest: int
) -> AbstractContextManager[Generator]:
    """A generator on what the job has, closed at the end."""
    settings = GeneratorSettings.of_job(ctx, precision, slots, longest)
    return closing(open_generator(folder, engine, settings))


def choose(folder: Path, device: str, engine: Engine) -> Engine:
    """torch or vllm; StageError where vllm is asked for and not there."""
    installed = find_spec("vllm") is not None
    if engine is Engine.VLLM and not installed:
        raise StageError(
            "rollout.engine is vllm, which is not installed here: install the project with its "
            "vllm extra (pip install '.[vllm]'), or set rollout.engine: torch"
        )
    if engine is not Engine.AUTO:
        return engine
    large = device.startswith("cuda") and num_weights(folder) > TORCH_WEIGHTS
    return Engine.VLLM if large and installed else Engine.TORCH


def num_weights(folder: Path) -> int:
    """Number of weights in a model folder's files."""
    total = 0
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:  # type: ignore[no-untyped-call]
            for name in file.keys():  # noqa: SIM118
                total += math.prod(file.get_slice(name).get_shape())
    return total
