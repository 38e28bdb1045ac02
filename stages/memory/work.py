"""The work of a stage as moments, each with what is in memory: learning, reading, sampling, saving.

What a stage's moments need of a GPU is given by them; `Work` notes beside it what they need of the
host: what was loaded, what learns, what waits there.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from stages.contracts.lora import LoraSave
from stages.contracts.params import Params
from stages.contracts.precision import Precision
from stages.contracts.reward_model import RewardStart
from stages.contracts.rewards import Model as Classifier
from stages.contracts.rollout import Engine
from stages.contracts.sharding import Sharding
from stages.memory.model import (
    BYTES,
    FLOAT32,
    Layout,
    Model,
    Part,
    Parts,
    Sampling,
    learner_state,
    learning,
    read_weights,
    reading,
    torch_sampler,
    vllm_sampler,
)
from stages.memory.shape import ModelShape

PROCESS = 300 << 20
"""Host memory of a stage's process before it has a model, torch and transformers imported, without
pages of files: as measured on a CPU."""
CUDA_PROCESS = 2 << 30
"""What CUDA's libraries add to it: an assumption, not measured."""
WRITERS, FILE_BYTES = 4, 10**9
"""Files that a process writes at a time, and what one has at most, but for a single tensor, as in
engines/models/tensor_files.py; a test compares them."""
TORCH_WEIGHTS = 3_000_000_000
"""As in engines/generation/generators.py; a test compares them."""
SIZES = 4
"""As in engines/forward/packed.py; a test compares them."""


@dataclass(frozen=True)
class Shapes:
    """The models that stages read; one whose sizes are not known yet is None, and not counted."""

    policy: ModelShape | None
    reward_model: ModelShape | None = None
    teacher: ModelShape | None = None
    classifiers: Mapping[str, ModelShape] = field(default_factory=dict)
    """By their names in `rewards`."""


@dataclass(frozen=True)
class Peak:
    """A moment, and what is in memory then."""

    when: str
    parts: Parts

    @property
    def total(self) -> int:
        return self.parts.total()


Peaks = Iterator[tuple[str, Parts]]


class Work:
    """What is common to the stages under some params and a layout."""

    def __init__(self, params: Params, shapes: Shapes, layout: Layout) -> None:
        self.params, self.shapes, self.layout = params, shapes, layout
        self.tokens = 0
        self.learners: list[Model] = []
        self.on_host: Parts = Counter()
        """Of each process, all the time."""
        self.loaded: list[Model] = []
        """Models that do not learn, and are whole on the host for a moment, in every process."""
        self.merged_for_vllm: list[Model] = []
        """The same in the processes that start a vLLM, which reads no adapters."""

    @property
    def longest(self) -> int:
        rollout = self.params.rollout
        own = max(self.params.model.max_length, rollout.max_new_tokens + 1)
        if self.params.episodes.context_tokens is not None:
            return own
        # Nothing is observed after the last turn.
        turns = rollout.max_turns - 1 if rollout.environment else 0
        return own + turns * rollout.max_observation_tokens

    @property
    def base(self) -> Model:
        assert self.shapes.policy is not None, "asked for only where it is known"
        return Model(self.shapes.policy, self.params.precision)

    @property
    def policy(self) -> Model:
        """Stages write float32; SFT without epochs leaves the base as it is."""
        base = self.base
        written = base.shape.float32 or self.params.sft.epochs > 0
        shape = replace(base.shape, float32=written)
        return replace(base, shape=shape, merged=self.leaves_adapters)

    @property
    def leaves_adapters(self) -> bool:
        """Whether what stages write are adapter folders, which are merged where they are read."""
        return self.params.lora.rank > 0 and self.params.lora.save is LoraSave.ADAPTER

    @property
    def reward_model(self) -> list[Model]:
        """One or, where it is not known, none."""
        shape, params = self.shapes.reward_model, self.params
        if shape is None:
            return []
        merged = self.leaves_adapters and params.reward_model.epochs > 0
        # As its stage leaves it.
        shape = replace(shape, float32=True)
        return [Model(shape, params.precision, scalar=True, merged=merged)]

    @property
    def reward_start(self) -> list[Model]:
        """What the reward model starts from. The head of a classifier is cut, which takes all."""
        shape, params = self.shapes.reward_model, self.params.reward_model
        alone = params.start is RewardStart.FOLDER and shape is not None and shape.classifier
        return [Model(shape, self.params.precision, scalar=True, alone=alone)] if shape else []

    @property
    def teacher(self) -> list[Model]:
        shape = self.shapes.teacher
        return [Model(shape, self.params.precision)] if shape else []

    def learner(self, model: Model, *, averaged: bool = False) -> Model:
        """The same, with what of it learns; an adapter goes on beside its base as it is."""
        lora = self.params.lora
        adapter = model.shape.adapter_weights(lora.rank, lora.targets) if lora.rank else 0
        return replace(model, adapter=adapter, averaged=averaged, merged=False)

    def resident(self, learners: list[Model]) -> Parts:
        """What learners keep between steps; of a critic, as one part."""
        kept: Parts = Counter()
        for model, is_critic in zip(learners, [False, True], strict=False):
            state = learner_state(model, self.layout)
            kept += Counter({Part.CRITIC: state.gpu.total()}) if is_critic else state.gpu
        return kept

    def learns(
        self, learners: list[Model], rows: int, length: int, beside: Parts | None = None
    ) -> Iterator[tuple[str, Parts]]:
        """Steps over so many rows of so many tokens, with other things in memory."""
        beside = beside or Counter()
        layout = self.layout
        self.learners = learners
        for model in learners:
            self.on_host += learner_state(model, layout).host
        sharing = layout.world // layout.sequence_parallel or 1
        in_step = -(-rows // sharing) * length
        budget = max(layout.micro_tokens, length)
        self.tokens = min(budget, in_step)
        if layout.is_compiled:
            quarter = -(-layout.micro_tokens // SIZES)
            self.tokens = -(-self.tokens // quarter) * quarter
        kept = self.resident(learners)
        accumulated = in_step > budget
        for parts in learning(learners, self.tokens, layout, accumulated=accumulated):
            yield "learning", beside + kept + parts
        if layout.sharding is Sharding.NONE:
            last = FLOAT32 * learners[-1].weights
            before = self.resident(learners[:-1])
            yield "loading", beside + before + Counter({Part.LOADING: last})

    def loads(self, model: Model) -> None:
        """To read it. What is spread is read by rows, where its files are like that."""
        if not (self.layout.spreads_readers and model.reads_rows):
            self.loaded.append(model)

    def reads(
        self, model: Model, part: Part, beside: Parts | None = None
    ) -> Iterator[tuple[str, Parts]]:
        """A pass without gradients by a model of its own."""
        self.loads(model)
        tokens = max(self.layout.micro_tokens, self.longest)
        weights = Counter({part: read_weights(model, self.layout)})
        yield "reading", (beside or Counter()) + weights + reading(model, tokens, self.layout)

    def classifiers(self, sources: Iterable[str]) -> list[tuple[Model, int]]:
        """Those of these sources of rewards that are classifiers, and the tokens of a pass."""
        found = []
        for name in dict.fromkeys(sources):
            source, shape = self.params.rewards.get(name), self.shapes.classifiers.get(name)
            if isinstance(source, Classifier) and shape is not None:
                model = Model(shape, source.precision, scalar=True, alone=True)
                found.append((model, source.batch_size * self.longest))
        return found

    def classifies(self, sources: Iterable[str]) -> Iterator[tuple[str, Parts]]:
        """By one after the other, each whole on every rank."""
        for model, tokens in self.classifiers(sources):
            self.loads(model)
            weights = Counter({Part.CLASSIFIER: model.bytes})
            yield "reading", weights + reading(model, tokens, self.layout)

    @property
    def uses_vllm(self) -> bool:
        engine = self.params.rollout.engine
        large = self.layout.on_gpu and self.policy.weights > TORCH_WEIGHTS
        return engine is Engine.VLLM or (engine is Engine.AUTO and large and self.layout.has_vllm)

    def samples(self, samples: int) -> Iterator[tuple[str, Parts]]:
        """A generator with weights of its own, alone."""
        model, layout = self.policy, self.layout
        sampling = Sampling(self.params.rollout.batch_size, samples, self.longest)
        if self.uses_vllm:
            yield "sampling", in_its_share(vllm_sampler(model, sampling, layout), layout)
            self.merged_for_vllm += [model] if model.merged else []
            return
        self.loaded.append(model)
        weights = Counter({Part.WEIGHTS: model.bytes})
        yield "sampling", weights + torch_sampler(model, sampling, layout, owns_weights=True)
        joined = BYTES[model.precision] * model.shape.joined_weights
        yield "loading", weights + Counter({Part.LOADING: joined})

    def processes(self) -> Parts:
        """Of a node."""
        each = PROCESS + (CUDA_PROCESS if self.layout.on_gpu else 0)
        return Counter({Part.PROCESSES: self.layout.tasks_per_node * each})

    def host_peaks(self) -> Iterator[Peak]:
        """Of a node whose GPUs do the work."""
        tasks = self.layout.tasks_per_node
        always = self.processes() + times(self.on_host, tasks)
        by_engine = self.layout.sharding in (Sharding.ZERO1, Sharding.ZERO2)
        # A learner is rounded on the GPU, or weight by weight where all of it is spread.
        # What is spread is read by rows: each rank has its part alone.
        by_rows = self.layout.spreads_readers
        whole = [model for model in self.learners if not (by_rows and model.reads_rows)]
        loading = [tasks * _loading(model, rounds=by_engine) for model in whole]
        loading += [tasks * _loading(model, rounds=True) for model in self.loaded]
        starting = max(1, tasks // self.layout.tensor_parallel)
        loading += [starting * _loading(model, rounds=False) for model in self.merged_for_vllm]
        for size in loading:
            yield Peak("loading", always + Counter({Part.LOADING: size}))
        for model in self.learners:
            # Embedding and head may be larger than a file; moments are twice the weights.
            outside = 2 * FLOAT32 * model.shape.vocabulary * model.shape.width
            files = tasks * WRITERS * FILE_BYTES + outside
            size = min(files, 2 * FLOAT32 * model.trained)
            # What an adapter is merged into is put together by one rank.
            size += FLOAT32 * model.weights if model.adapter else 0
            yield Peak("saving", always + Counter({Part.SAVING: size}))
        yield Peak("running", always)


def _loading(model: Model, *, rounds: bool) -> int:
    """Host memory of one process, without pages of files: what is new there, and what is rounded.

    New are weights that are cast, that an adapter is added to, or that are put together of several.
    """
    as_in_files = model.shape.float32 and model.shape.by_rows and not model.merged
    total = 0 if as_in_files else FLOAT32 * model.weights
    if model.precision is not Precision.FLOAT32 and rounds:
        total += model.bytes
    return total


def in_its_share(parts: Parts, layout: Layout) -> Parts:
    """With what of the GPU is not vLLM's, so that the sum is what the GPU must have."""
    left = round(parts.total() * (1 / layout.generator_memory - 1)) if layout.on_gpu else 0
    return parts + Counter({Part.RESERVED: left})


def times(parts: Parts, number: int) -> Parts:
    return Counter({part: size * number for part, size in parts.items()})
