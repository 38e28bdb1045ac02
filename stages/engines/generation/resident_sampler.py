"""The policy that learns, as the one that answers, in one process.

The torch generator answers with the learner's own weights. It gets a model of its own where the
learner's weights are not what is sampled from: under an adapter, which a sampler loads merged, and
while the learner moves on. Any other engine is given the weights as a folder in the scratch.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from stages.context import Context
from stages.contracts.online import OnlineConfig
from stages.contracts.rollout import Engine
from stages.engines.generation.generator import Generator, GeneratorSettings
from stages.engines.generation.generators import choose, open_generator
from stages.engines.generation.torch_generator import TorchGenerator
from stages.engines.models.background_hash import BackgroundHash
from stages.engines.models.folders import load_policy, save_model
from stages.engines.models.lora import has_adapter, named_weights
from stages.engines.training.learner import AnyLearner

UNKNOWN = "not-hashed-yet"


class ResidentSampler:
    def __init__(
        self,
        config: OnlineConfig,
        folder: Path,
        learner: AnyLearner,
        ctx: Context,
        hasher: Executor,
        longest: int,
    ) -> None:
        """`longest` is how many tokens a prompt and its response have at most, of all steps."""
        self._config, self._source, self._learner = config, folder, learner
        self._apart = apart = config.online.overlap
        self._device, self._aside = ctx.device, ctx.scratch / "sampler"
        slots = config.rollout.batch_size
        self._settings = GeneratorSettings.of_job(ctx, config.precision, slots, longest)
        self._hash = BackgroundHash(hasher)
        # Work of one stream waits for all before it, a learner's too.
        beside = apart and ctx.device.startswith("cuda")
        self._stream = torch.cuda.Stream(ctx.device) if beside else None  # type: ignore[no-untyped-call]
        self._torch: TorchGenerator | None = None
        self._other: Generator | None = None
        self._copy: Any = None
        if choose(folder, ctx.device, config.rollout.engine) is Engine.TORCH:
            self._torch = TorchGenerator(ctx.device, config.precision, slots)
            if apart or has_adapter(learner.model):
                self._copy = load_policy(folder, ctx.device, config.precision)

    def take(self) -> None:
        """Answer with the learner's weights as they are now."""
        if self._torch is None:
            self._take_folder()
            return
        model = self._learner.model
        if self._copy is not None:
            model = self._copy
            own = model.state_dict()
            with torch.no_grad(), self._learner.full_precision() as whole:
                for name, weight in named_weights(whole):
                    own[name].copy_(weight)
        self._hash.start(model)
        # The trainer compares all that a policy gradient is made of, with the same weights unless
        # it has moved on.
        compared = self._config.algorithm.is_policy_gradient and not self._apart
        self._torch.take(model, UNKNOWN, compared=compared)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _take_folder(self) -> None:
        shutil.rmtree(self._aside, ignore_errors=True)
        with self._learner.full_precision() as whole:
            save_model(whole, self._aside, tokenizer_from=self._source, lora=self._config.lora)
        if self._other is None:
            engine = self._config.rollout.engine
            self._other = open_generator(self._aside, engine, self._settings)
        else:
            self._other.wake()
            self._other.load(self._aside)

    def policy_hash(self) -> str:
        """Of the weights that were taken; they may move on once it is there."""
        return self._hash.wait() if self._other is None else self._other.policy_hash

    @contextmanager
    def opened(self) -> Iterator[Generator]:
        generator = self._torch or self._other
        assert generator is not None, "it takes the weights first"
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            yield generator

    def rest(self) -> None:
        """Until it takes weights again, one with weights of its own leaves the GPU to others."""
        if self._other is not None:
            self._other.sleep()

    def close(self) -> None:
        for generator in (self._torch, self._other):
            if generator is not None:
                generator.close()
