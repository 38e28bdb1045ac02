"""The policy that learns, as the one that answers, on every rank.

The torch generator answers with the learner's own weights. It gets a model of its own where the
learner's weights are not what is sampled from: under an adapter, which a sampler loads merged;
while the learner moves on; and where the learner is spread over the ranks, whose parts come to each
of them through memory, one weight at a time, rounded. vLLM is given the weights in the same way, a
replica on each rank or on each group of neighbours, and compares what it holds with them.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from stages.context import Context, StageError
from stages.contracts.online import OnlineConfig
from stages.contracts.rollout import Engine
from stages.engines.generation.generator import Generator, GeneratorSettings
from stages.engines.generation.generators import choose, torch_generator
from stages.engines.generation.torch_generator import TorchGenerator
from stages.engines.generation.weight_pieces import Through, compare, load
from stages.engines.models.background_hash import BackgroundHash
from stages.engines.models.folders import load_policy
from stages.engines.models.lora import has_adapter
from stages.engines.models.weights import is_rearranged
from stages.engines.processes.ranks import ALONE
from stages.engines.processes.sampling_group import SamplingGroup
from stages.engines.training.learner import AnyLearner
from stages.engines.training.sampled import policy_hash, sampled_weights

if TYPE_CHECKING:
    from stages.engines.generation.vllm_generator import VllmGenerator
    from stages.engines.generation.vllm_start import NodeWorkers

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
        self._ranks = ctx.ranks or ALONE
        self._apart = apart = config.online.overlap
        self._is_alone = ctx.only_samples
        job = range(ctx.world + ctx.samplers)
        self._numbers = job[ctx.world :] if ctx.only_samples else job[: ctx.world]
        """Of the ranks that sample, in the job."""
        self._device = ctx.device
        slots = config.rollout.batch_size
        self._settings = GeneratorSettings.of_job(ctx, config.precision, slots, longest)
        self._hash = BackgroundHash(hasher)
        # Work of one stream waits for all before it, a learner's too.
        beside = apart and ctx.device.startswith("cuda")
        self._stream = torch.cuda.Stream(ctx.device) if beside else None  # type: ignore[no-untyped-call]
        self._torch: TorchGenerator | None = None
        self._vllm: VllmGenerator | Neighbour | None = None
        self._copy: Any = None
        if choose(folder, ctx.device, config.rollout.engine) is Engine.TORCH:
            self._torch = torch_generator(self._settings)
            if apart or has_adapter(learner.model) or learner.lockstep:
                self._copy = load_policy(folder, ctx.device, config.precision)

    def take(self) -> None:
        """Answer with the learner's weights as they are now; all ranks."""
        if self._torch is None:
            self._give_vllm()
            return
        model = self._learner.model
        if self._copy is not None:
            model = self._copy
            self._copy_weights()
        if not self._ranks.rank:
            self._hash.start(model)
        # The trainer compares all that a policy gradient is made of, with the same weights unless
        # it has moved on.
        compared = self._config.algorithm.is_policy_gradient and not self._apart
        self._torch.take(model, UNKNOWN, compared=compared, owned=self._copy is not None)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @torch.no_grad()
    def _copy_weights(self) -> None:
        """From the learner's, wherever they are, into the model that answers, one by one."""
        own = self._copy.state_dict()
        for name, weight in sampled_weights(self._learner):
            own[name].copy_(weight)

    def _give_vllm(self) -> None:
        if self._device.startswith("cuda"):
            # What learning has left in this process's cache the engine's processes cannot use.
            torch.cuda.empty_cache()
        if (group := self._settings.group) is not None:
            group.meet("the weights for their sampler")
        if self._vllm is None:
            if group is not None:
                group.agree_to_open(True)
            self._vllm = self._open_vllm()
        vllm = self._vllm
        self._in_step(lambda weights: vllm.take(self._hashed(weights)))
        # What the workers hold by now, beside what the learner has: nothing in between is trusted.
        self._in_step(vllm.compare)
        vllm.policy_hash = UNKNOWN

    def _hashed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights, of which each rank has some hashed in the background."""
        share = []
        for index, (name, weight) in enumerate(weights):
            if index % self._ranks.world == self._ranks.rank:
                share.append((name, self._hash.copied(name, weight)))
            yield name, weight
        self._hash.start_lines(share)

    def _in_step(self, give: Callable[[Iterable[tuple[str, Tensor]]], None]) -> None:
        """Give all weights, on all ranks; what fails on one of them fails on all.

        Nobody waits for a rank on which it does: that goes through the weights to the end.
        """
        weights = sampled_weights(self._learner)
        wrong = ""
        try:
            give(weights)
        except StageError as error:
            wrong = str(error)
            for _ in weights:
                pass
        for rank, of_rank in zip(self._numbers, self._ranks.gather(wrong), strict=True):
            if of_rank:
                raise StageError(f"rank {rank}: {of_rank}" if self._ranks.world > 1 else of_rank)

    def _open_vllm(self) -> "VllmGenerator | Neighbour":
        group = self._settings.group
        if group is not None and not group.leads:
            return Neighbour(group, self._device, self._open_workers(group))
        from stages.engines.generation.vllm_generator import VllmGenerator

        return VllmGenerator(self._source, self._settings, empty=True)

    def _open_workers(self, group: SamplingGroup) -> "NodeWorkers | None":
        if group.num_nodes == 1 or not group.leads_node:
            return None
        from stages.engines.generation.vllm_start import NodeWorkers

        return NodeWorkers(self._source, self._settings, empty=True)

    def policy_hash(self) -> str:
        """Of the weights that were taken, on every rank; they may move on once it is there."""
        if self._vllm is None:
            return self._ranks.same("" if self._ranks.rank else self._hash.wait())
        of_ranks = self._ranks.gather(self._hash.wait_lines())
        lines = {name: line for share in of_ranks for name, line in share.items()}
        return policy_hash(self._learner, lines)

    @contextmanager
    def opened(self) -> Iterator[Generator]:
        generator = self._torch or self._vllm
        assert generator is not None, "it takes the weights first"
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            # A neighbour has no share of the requests.
            yield cast(Generator, generator)

    def rest(self) -> None:
        """Until it takes weights again, one with weights of its own leaves the GPU to others."""
        if self._vllm is not None and not self._is_alone:
            self._vllm.sleep()

    def close(self) -> None:
        for generator in (self._torch, self._vllm):
            if generator is not None:
                generator.close()


def refuse_what_vllm_cannot_load(model: Any) -> None:
    """Before anything is sampled; those that learn."""
    if is_rearranged(model):
        raise StageError(
            "the files of this model are arranged in another way than its weights in memory, "
            "and vLLM knows the files: set rollout.engine: torch for rl.online"
        )


class Neighbour:
    """In place of vLLM on a rank whose GPU the vLLM of its group's first rank uses, too.

    It gives the worker on this GPU the weights, when the first rank's takes and compares them.
    """

    policy_hash = ""

    def __init__(
        self, group: SamplingGroup, device: str, workers: "NodeWorkers | None" = None
    ) -> None:
        """`workers`: those of this node, on the first rank of a node after the first."""
        self._receiver = (group.call_by(None), Through.between_processes(device), device)
        self._workers = workers

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        load(weights, *self._receiver)

    def compare(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        compare(weights, *self._receiver)

    def sleep(self) -> None:
        """The first rank's does."""

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
