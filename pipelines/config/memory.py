"""The memory that a stage needs beside what its profile gives, and what to change if it is less.

The estimate is stages.memory's. It is compared with `gpu_memory` and `memory` of the profile, and
with nothing where these are not set. A model that is not there yet has no sizes: then nothing is
estimated, and nothing refused.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.config.profiles import (
    ExecutorKind,
    MemoryCheck,
    Profile,
    Resources,
    bytes_of,
    num_samplers,
    processes_of,
    tensor_parallel_of,
    wrong_with_groups,
)
from stages.contracts.base import Processes, Stage
from stages.contracts.catalog import STAGES
from stages.contracts.params import Params
from stages.contracts.reward_model import RewardStart
from stages.contracts.rewards import Model as Classifier
from stages.contracts.sharding import Offload, Sharding
from stages.memory.model import GIB, Layout, Part
from stages.memory.shape import built_shape, read_shape
from stages.memory.stage import Needs, needs
from stages.memory.work import Peak, Shapes

BASE = "artifacts/base"
SHOWN = 4
"""Parts that a refusal names, largest first."""
FEWEST_TOKENS = 512
"""Of a pass that is advised."""
MOST_NODES = 64
SHARES = (0.6, 0.4, 0.2)
"""Of a GPU for vLLM, that are advised."""


@dataclass(frozen=True)
class MemoryUse:
    """One stage's needs under its resources."""

    stage: str
    """Without `@policy`."""
    resources: Resources
    needs: Needs

    @property
    def gpu_given(self) -> int:
        """Bytes of a GPU; 0: not known."""
        return bytes_of(self.resources.gpu_memory)

    @property
    def gpu_needed(self) -> int:
        return self.needs.gpu.total if self.needs.gpu else 0

    @property
    def host_given(self) -> int:
        """Bytes of a node; 0: not known."""
        return bytes_of(self.resources.memory)

    @property
    def lacks_gpu(self) -> bool:
        return 0 < self.gpu_given < self.gpu_needed

    @property
    def lacks_host(self) -> bool:
        return 0 < self.host_given < self.needs.host.total

    @property
    def fits(self) -> bool:
        return not self.lacks_gpu and not self.lacks_host

    def __str__(self) -> str:
        """`GPU 62 of 80G, host 91 of 960G`."""
        gpu = self.needs.gpu
        shown = [_of("GPU", gpu.total, self.gpu_given)] if gpu else []
        return ", ".join([*shown, _of("host", self.needs.host.total, self.host_given)])

    def breakdown(self) -> list[str]:
        """A line for the GPU and one for the host, largest part first."""
        found = {"GPU": self.needs.gpu, "host": self.needs.host}
        lines = [f"{name} while {p.when}: {_parts(p)}" for name, p in found.items() if p]
        tokens = f", passes of {self.needs.tokens}" if self.needs.tokens else ""
        return [*lines, f"for sequences of up to {self.needs.longest} tokens{tokens}"]

    def as_json(self) -> dict[str, Any]:
        gpu, host = self.needs.gpu, self.needs.host
        return {
            "gpu": gpu and _peak_json(gpu, self.gpu_given),
            "host": _peak_json(host, self.host_given),
            "longest_sequence": self.needs.longest,
            "tokens_per_pass": self.needs.tokens,
            "fits": self.fits,
        }


class Estimator:
    """The needs of any stage under params and a profile; every config.json is read once."""

    def __init__(self, root: Path, params: Params, name: str, profile: Profile) -> None:
        self.params, self.name, self.profile = params, name, profile
        self.shapes = find_shapes(root, params)

    @property
    def unknown(self) -> str | None:
        """Why nothing is estimated, where that is so."""
        if self.shapes.policy is not None:
            return None
        return (
            f"memory is not estimated: model.folder {self.params.model.folder} has no config.json"
        )

    def use(self, stage: str, changes: Mapping[str, Any] | None = None) -> MemoryUse | None:
        """With changes to the profile; None where it has no model, or one that is not known."""
        if stage not in STAGES:
            return None
        resources = self.profile.resources(stage).model_copy(update=dict(changes or {}))
        found = needs(stage, self.params, self.shapes, layout_of(STAGES[stage], resources))
        return MemoryUse(stage, resources, found) if found else None

    def refusal(self, stage: str) -> str | None:
        """Why a stage does not fit, and what to change; None if it does, or nobody asks."""
        use = self.use(stage)
        if use is None or use.fits or use.resources.memory_check is MemoryCheck.OFF:
            return None
        gpu, host = use.needs.gpu, use.needs.host
        short = []
        if gpu and use.lacks_gpu:
            short.append(_short("of each GPU", gpu, "gpu_memory", use.gpu_given))
        if use.lacks_host:
            short.append(_short("of each node", host, "memory", use.host_given))
        return (
            f"slurm_profiles/{self.name}.yaml: {stage} {', and '.join(short)}. "
            f"{self._advice(use)}. If you know better, set `stages.{stage}.memory_check` to warn"
        )

    def _advice(self, use: MemoryUse) -> str:
        """The smallest change after which the stage fits."""
        least = use
        on_slurm = self.profile.executor is ExecutorKind.SLURM
        node_gpus = max(self.profile.resources(stage).gpus_per_node for stage in STAGES)
        stage = STAGES[use.stage]
        for changes in _changes(use.resources, use.needs.longest, node_gpus, spreads=on_slurm):
            changed = use.resources.model_copy(update=dict(changes))
            joined = processes_of(stage, changed) is Processes.TOGETHER
            if stage.processes is Processes.SHARDS:
                if "tasks_per_node" in changes and not joined:
                    continue  # each would have all that one has
                changes = {**changes, "shards": 1} if joined and changed.shards > 1 else changes
            if wrong_with_groups(stage, changed):
                continue
            other = self.use(use.stage, changes)
            if other is None or other.lacks_gpu:
                least = min(least, other or least, key=lambda each: each.gpu_needed)
                continue
            if other.lacks_host:
                changes = {**changes, "memory": _at_least(other.needs.host.total)}
            named = (f"`stages.{use.stage}.{key}` to {_spelt(of)}" for key, of in changes.items())
            return f"Set {', '.join(named)}{_hint(other) if other.lacks_host else ''}"
        return (
            f"No setting of the profile makes it fit: use GPUs with {_at_least(least.gpu_needed)}, "
            "a smaller model, shorter sequences (`model.max_length`), fewer of them at once "
            "(`rollout.batch_size`) or an adapter (`lora.rank`)"
        )


def find_shapes(root: Path, params: Params) -> Shapes:
    """The sizes of the models that params name, as far as they are there."""
    model = params.model
    if model.source == "folder":
        policy = read_shape(root / model.folder)
        if policy is None:
            # A GGUF file has no config.json; what prepare has made of it has one.
            policy = read_shape(root / BASE)
    else:
        policy = built_shape(model)
    reward = policy
    if params.reward_model.start is RewardStart.FOLDER:
        reward = read_shape(root / params.reward_model.folder)
    given = root / params.score.folder
    classifiers = {
        name: read_shape(given / source.folder)
        for name, source in params.rewards.items()
        if isinstance(source, Classifier)
    }
    return Shapes(
        policy,
        reward,
        read_shape(root / params.rl.teacher),
        {name: shape for name, shape in classifiers.items() if shape},
    )


def layout_of(stage: Stage, resources: Resources) -> Layout:
    """Only what is done together is spread over ranks."""
    together = processes_of(stage, resources) is Processes.TOGETHER
    learns_together = stage.processes is Processes.TOGETHER and not stage.reads
    elsewhere = resources.python or resources.container
    return Layout(
        on_gpu=resources.device.startswith("cuda"),
        nodes=resources.nodes if together else 1,
        tasks_per_node=resources.tasks_per_node if together else 1,
        sharding=resources.sharding if together else Sharding.NONE,
        offload=resources.offload,
        sequence_parallel=resources.sequence_parallel if learns_together else 1,
        tensor_parallel=tensor_parallel_of(stage, resources),
        samplers=num_samplers(stage, resources),
        generator_memory=resources.generator_memory,
        gpu_memory=bytes_of(resources.gpu_memory),
        micro_tokens=resources.micro_tokens,
        compile=resources.compile,
        checkpoint_activations=resources.checkpoint_activations,
        has_vllm=bool(elsewhere) or _vllm_is_here(),
    )


@cache
def _vllm_is_here() -> bool:
    return find_spec("vllm") is not None


def refuse_what_cannot_fit(
    root: Path, params: Params, name: str, profile: Profile, addresses: Iterable[str]
) -> list[str]:
    """LockstepError with all that does not fit; the warnings, where the profile says to warn."""
    estimator = Estimator(root, params, name, profile)
    refused: list[str] = []
    warned: list[str] = []
    for stage in dict.fromkeys(address.split("@")[0] for address in addresses):
        if said := estimator.refusal(stage):
            is_refused = profile.resources(stage).memory_check is MemoryCheck.REFUSE
            (refused if is_refused else warned).append(said)
    if refused:
        raise LockstepError("\n".join(refused))
    return warned


def _changes(
    resources: Resources, longest: int, node_gpus: int, *, spreads: bool
) -> Iterator[Mapping[str, Any]]:
    """Ways to need less of a GPU, those that cost least first; the first is no change.

    `node_gpus`: as many as any stage has of a node.
    """
    fewer: list[dict[str, Any]] = []
    tokens = resources.micro_tokens // 2
    while tokens >= max(longest, FEWEST_TOKENS):
        fewer.append({"micro_tokens": tokens})
        tokens //= 2
    again: dict[str, Any] = {"checkpoint_activations": True}
    yield {}
    yield from fewer[:1]
    yield again
    yield from fewer[1:]
    yield from ({**again, **few} for few in fewer)
    smallest = {**again, **(fewer[-1] if fewer else {})}
    for width in _doubled(2 * resources.tensor_parallel, node_gpus):
        more = {"gpus_per_node": width} if width > resources.gpus_per_node else {}
        yield {"tensor_parallel": width, **more}
        yield {"tensor_parallel": width, **more, **(fewer[-1] if fewer else {})}
    for share in SHARES:
        if share < resources.generator_memory:
            yield {"generator_memory": share}
            yield {"generator_memory": share, **smallest}
    yield from _spread(resources, [{}, again, smallest], resources.nodes if spreads else 0)
    if resources.sharding is Sharding.NONE:
        yield {"offload": Offload.OPTIMIZER, **again}
        yield {"offload": Offload.OPTIMIZER, **smallest}
    yield from _spread(resources, [{}, again, smallest], MOST_NODES if spreads else 0)
    yield from _sample_together(resources, node_gpus, smallest, MOST_NODES if spreads else 0)


def _spread(
    resources: Resources, others: Sequence[Mapping[str, Any]], most: int
) -> Iterator[Mapping[str, Any]]:
    """A process a GPU, on up to so many nodes, beside any of the other changes."""
    tasks = max(resources.gpus_per_node, resources.tasks_per_node)
    for nodes in _doubled(resources.nodes, most):
        wanted = {"nodes": nodes, "tasks_per_node": tasks}
        where = {key: of for key, of in wanted.items() if of != getattr(resources, key)}
        for kind in list(Sharding)[1:] if nodes * tasks > 1 else ():
            for other in others:
                yield {"sharding": kind, **where, **other}


def _sample_together(
    resources: Resources, node_gpus: int, smallest: Mapping[str, Any], most: int
) -> Iterator[Mapping[str, Any]]:
    """A vLLM over all GPUs of a node or of several, with a process on each; on up to so many nodes.

    What is read beside it is then to be spread, too.
    """
    for spanned in _doubled(1, most if node_gpus else 0):
        for nodes in _doubled(spanned * -(-resources.nodes // spanned), most):
            wanted = {
                "nodes": nodes,
                "tasks_per_node": node_gpus,
                "gpus_per_node": node_gpus,
                "tensor_parallel": spanned * node_gpus,
            }
            where = {key: of for key, of in wanted.items() if of != getattr(resources, key)}
            spread = {} if resources.sharding.spreads_weights else {"sharding": Sharding.FSDP}
            yield where
            yield {**where, **spread}
            yield {**where, **spread, **smallest}
            for share in SHARES:
                yield {**where, **spread, **smallest, "generator_memory": share}


def _doubled(number: int, most: int) -> Iterator[int]:
    while number <= most:
        yield number
        number *= 2


def _spelt(value: object) -> str:
    """As in a profile."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _at_least(size: int) -> str:
    return f"{math.ceil(size / GIB)}G"


def _hint(use: MemoryUse) -> str:
    """A base model that is not float32 is read whole by every rank, unless it is spread."""
    (largest, _), *_ = use.needs.host.parts.most_common()
    if largest is not Part.LOADING:
        return ""
    shared = ", or save the model's files in float32, which the ranks of a node share"
    if STAGES[use.stage].reads or use.resources.tasks_per_node == 1:
        return shared
    return f"{shared}, or set `stages.{use.stage}.sharding` to fsdp: each reads its part alone"


def _of(name: str, needed: int, given: int) -> str:
    return f"{name} {_size(needed)} of {_size(given)}G" if given else f"{name} {_size(needed)}G"


def _size(number: int) -> str:
    return f"{number / GIB:.1f}" if number < 10 * GIB else f"{number / GIB:.0f}"


def _short(where: str, peak: Peak, key: str, given: int) -> str:
    parts = _parts(peak, SHOWN)
    return (
        f"needs about {_size(peak.total)}G {where} while {peak.when} ({parts}), and `{key}` is "
        f"{_size(given)}G"
    )


def _parts(peak: Peak, most: int | None = None) -> str:
    shown = [(part, size) for part, size in peak.parts.most_common(most) if size]
    return ", ".join(f"{part} {_size(size)}G" for part, size in shown)


def _peak_json(peak: Peak, given: int) -> dict[str, Any]:
    return {
        "when": peak.when,
        "bytes": peak.total,
        "given": given or None,
        "parts": {part.value: size for part, size in peak.parts.most_common() if size},
    }
