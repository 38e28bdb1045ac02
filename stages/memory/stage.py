"""What one stage needs: of each GPU, and of each node's own memory, at the moment that takes most.

Lengths are bounds, since data have none before they are prepared: a row has `model.max_length`
tokens, a response `rollout.max_new_tokens` of them; what environments say comes on top.

Not counted: rows in memory, pages of mapped files (which the kernel takes back when it needs them),
classifiers and servers that `rewards` names.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from stages.contracts.objectives import PreferenceLoss, RewardObjective
from stages.contracts.params import Params
from stages.contracts.policy_update import Critic, DpoReference
from stages.contracts.precision import Precision
from stages.contracts.rl import Algorithm, Reward
from stages.contracts.rollout import Engine
from stages.contracts.sharding import Sharding
from stages.memory.model import (
    BYTES,
    CUDA_CONTEXT,
    CUDA_LIBRARIES,
    FLOAT32,
    Layout,
    Model,
    Part,
    Parts,
    Sampling,
    learner_state,
    learning,
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


@dataclass(frozen=True)
class Peak:
    """A moment, and what is in memory then."""

    when: str
    parts: Parts

    @property
    def total(self) -> int:
        return self.parts.total()


@dataclass(frozen=True)
class Needs:
    """Of one stage."""

    gpu: Peak | None
    """Of one GPU; None where the stage uses none."""
    host: Peak
    """Of one node."""
    longest: int
    """Tokens of the longest sequence."""
    tokens: int
    """Of the largest pass; 0 where none is learnt from."""


def needs(stage: str, params: Params, shapes: Shapes, layout: Layout) -> Needs | None:
    """Of a stage by its name without `@policy`; None where it has no model, or an unknown one."""
    describe = STAGES.get(stage)
    work = Work(params, shapes, layout)
    if describe is None or shapes.policy is None:
        return None
    peaks = [Peak(when, parts) for when, parts in describe(work)]
    if not peaks:
        return None
    device = max(peaks, key=lambda peak: peak.total)
    if layout.on_gpu:
        libraries = Counter({Part.PROCESSES: CUDA_CONTEXT + CUDA_LIBRARIES})
        gpu = Peak(device.when, device.parts + libraries)
        host = max(work.host_peaks(), key=lambda peak: peak.total)
    else:
        gpu = None
        host = Peak(device.when, _times(device.parts, layout.tasks_per_node) + work.processes())
    return Needs(gpu, host, work.longest, work.tokens)


class Work:
    """What is common to the stages under some params and a layout."""

    def __init__(self, params: Params, shapes: Shapes, layout: Layout) -> None:
        self.params, self.shapes, self.layout = params, shapes, layout
        self.tokens = 0
        self.learners: list[Model] = []
        self.on_host: Parts = Counter()
        """Of each process, all the time."""
        self.loaded: list[Model] = []

    @property
    def longest(self) -> int:
        rollout = self.params.rollout
        own = max(self.params.model.max_length, rollout.max_new_tokens + 1)
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
        return replace(base, shape=replace(base.shape, float32=written))

    @property
    def reward_model(self) -> list[Model]:
        """One or, where it is not known, none."""
        shape = self.shapes.reward_model
        return [Model(shape, self.params.precision, scalar=True)] if shape else []

    @property
    def teacher(self) -> list[Model]:
        shape = self.shapes.teacher
        return [Model(shape, self.params.precision)] if shape else []

    def learner(self, model: Model, *, averaged: bool = False) -> Model:
        """The same, with what of it learns."""
        lora = self.params.lora
        adapter = model.shape.adapter_weights(lora.rank, lora.targets) if lora.rank else 0
        return replace(model, adapter=adapter, averaged=averaged)

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
        self.loaded += learners
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

    def reads(
        self, model: Model, part: Part, beside: Parts | None = None
    ) -> Iterator[tuple[str, Parts]]:
        """A pass without gradients by a model of its own."""
        self.loaded.append(model)
        tokens = max(self.layout.micro_tokens, self.longest)
        weights = Counter({part: model.bytes})
        yield "reading", (beside or Counter()) + weights + reading(model, tokens, self.layout)

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
            yield "sampling", _in_its_share(vllm_sampler(model, sampling, layout), layout)
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
        always = self.processes() + _times(self.on_host, tasks)
        for model in self.loaded:
            yield Peak("loading", always + Counter({Part.LOADING: tasks * self._loading(model)}))
        for model in self.learners:
            # Embedding and head may be larger than a file; moments are twice the weights.
            outside = 2 * FLOAT32 * model.shape.vocabulary * model.shape.width
            files = tasks * WRITERS * FILE_BYTES + outside
            size = min(files, 2 * FLOAT32 * model.trained)
            # What an adapter is merged into is put together by one rank.
            size += FLOAT32 * model.weights if model.adapter else 0
            yield Peak("saving", always + Counter({Part.SAVING: size}))
        yield Peak("running", always)

    def _loading(self, model: Model) -> int:
        """Of one process: what is not a page of a file."""
        total = 0 if model.shape.float32 else FLOAT32 * model.weights
        # A learner is rounded on the GPU, or weight by weight where all of it is spread.
        whole_on_gpu = model in self.learners and self.layout.sharding.value not in (
            "zero1",
            "zero2",
        )
        if model.precision is not Precision.FLOAT32 and not whole_on_gpu:
            total += model.bytes
        return total


def _in_its_share(parts: Parts, layout: Layout) -> Parts:
    """With what of the GPU is not vLLM's, so that the sum is what the GPU must have."""
    left = round(parts.total() * (1 / layout.generator_memory - 1)) if layout.on_gpu else 0
    return parts + Counter({Part.RESERVED: left})


def _times(parts: Parts, number: int) -> Parts:
    return Counter({part: size * number for part, size in parts.items()})


Peaks = Iterator[tuple[str, Parts]]


def _sft(work: Work) -> Peaks:
    params = work.params.sft
    if not params.epochs:
        return
    learner = work.learner(work.base, averaged=params.ema_decay > 0)
    yield from work.learns([learner], params.batch_size, work.params.model.max_length)


def _reward_model(work: Work) -> Peaks:
    params = work.params.reward_model
    sides = 2 if params.objective is RewardObjective.BRADLEY_TERRY else 1
    for model in work.reward_model:
        if not params.epochs:
            yield from work.reads(model, Part.WEIGHTS)
            continue
        learner = work.learner(model, averaged=params.ema_decay > 0)
        yield from work.learns([learner], params.batch_size, sides * work.params.model.max_length)


def _preference(work: Work) -> Peaks:
    params = work.params.preference
    learner = work.learner(work.policy, averaged=params.ema_decay > 0)
    sides = 1 if params.loss is PreferenceLoss.KTO else 2
    yield from work.learns([learner], params.batch_size, sides * work.params.model.max_length)


def _reference_logprobs(work: Work) -> Peaks:
    yield from work.reads(work.policy, Part.REFERENCE)


def _rollout(work: Work) -> Peaks:
    yield from work.samples(work.params.rollout.samples)


def _rewarding(work: Work) -> list[Model]:
    """The reward model, where it rates."""
    sources = work.params.score.weights or {work.params.rl.reward: 1.0}
    return work.reward_model if Reward.REWARD_MODEL in sources else []


def _score(work: Work) -> Peaks:
    for model in _rewarding(work):
        yield from work.reads(model, Part.REWARD_MODEL)
    if work.params.score.reference:
        yield from work.reads(work.policy, Part.REFERENCE)


def _evaluate(work: Work) -> Peaks:
    yield from work.samples(work.params.evaluate.samples + 1)
    yield from work.reads(work.policy, Part.REFERENCE)
    rates = Reward.REWARD_MODEL in (work.params.rl.reward, work.params.evaluate.correct)
    for model in work.reward_model if rates else ():
        yield from work.reads(model, Part.REWARD_MODEL)


def _learners(work: Work) -> list[Model]:
    """The policy and, for PPO, the critic."""
    params = work.params
    policy = work.policy
    start = params.policy_update.critic
    if params.rl.algorithm is not Algorithm.PPO or start is Critic.NONE:
        return [work.learner(policy)]
    if start is Critic.AUTO:
        is_given = params.rl.reward == Reward.REWARD_MODEL
        start = Critic.REWARD_MODEL if is_given else Critic.POLICY
    critics = work.reward_model if start is Critic.REWARD_MODEL else [replace(policy, scalar=True)]
    return [work.learner(model) for model in (policy, *critics)]


def _updates(work: Work, beside: Parts, read: list[tuple[Model, Part]]) -> Peaks:
    """The steps of an update, and the passes without gradients before them by these models."""
    params, learners = work.params, _learners(work)
    pairs = params.rl.algorithm is Algorithm.DPO
    length = (2 if pairs else 1) * work.longest
    yield from work.learns(learners, params.policy_update.batch_size, length, beside)
    kept = beside + work.resident(learners)
    for model, part in read:
        yield from work.reads(model, part, kept)


def _read_by_update(work: Work) -> list[tuple[Model, Part]]:
    params = work.params
    if params.rl.algorithm is Algorithm.DISTILL:
        return [(teacher, Part.TEACHER) for teacher in work.teacher]
    if (
        params.rl.algorithm is Algorithm.DPO
        and params.policy_update.dpo_reference is DpoReference.SFT
    ):
        return [(work.policy, Part.REFERENCE)]
    return []


def _policy_update(work: Work) -> Peaks:
    yield from _updates(work, Counter(), _read_by_update(work))


def _online(work: Work) -> Peaks:
    """Everything stays: what is read once is resident from then on."""
    params, layout, model = work.params, work.layout, work.policy
    read = _read_by_update(work)
    if params.score.reference and Part.REFERENCE not in [part for _, part in read]:
        read.append((model, Part.REFERENCE))
    read += [(rating, Part.REWARD_MODEL) for rating in _rewarding(work)]
    residents: Parts = Counter()
    for each, part in read:
        residents[part] += each.bytes
        work.loaded.append(each)
    rollout = params.rollout
    sampling = Sampling(rollout.batch_size, rollout.samples, work.longest)
    kept = work.resident(_learners(work))
    if work.uses_vllm:
        least = vllm_sampler(model, sampling, layout)
        yield "sampling", _in_its_share(least, layout)
        share = max(least.total(), round(layout.generator_memory * layout.gpu_memory))
        yield "sampling", residents + kept + Counter({Part.SAMPLER: share})
        # Asleep, its weights are on the host.
        work.on_host[Part.SAMPLER] += least[Part.WEIGHTS]
        own: Parts = Counter()
    else:
        # What is spread over ranks is gathered into weights of the sampler's own.
        is_spread = layout.sharding is not Sharding.NONE
        own = torch_sampler(model, sampling, layout, owns_weights=is_spread)
        apart = params.online.overlap or params.lora.rank or is_spread
        own += Counter({Part.SAMPLER: model.bytes if apart else 0})
        yield "sampling", residents + kept + own
        # What a pass over prompts takes is free again, what overlaps is not.
        if not params.online.overlap:
            own[Part.ACTIVATIONS] = 0
    yield from _updates(work, residents + own, [])
    for each, _ in read:
        tokens = max(layout.micro_tokens, work.longest)
        yield "reading", residents + own + kept + reading(each, tokens, layout)


STAGES = {
    "sft": _sft,
    "reward_model": _reward_model,
    "preference": _preference,
    "reference_logprobs": _reference_logprobs,
    "rollout": _rollout,
    "score": _score,
    "policy_update": _policy_update,
    "online": _online,
    "evaluate": _evaluate,
    "evaluate_sft": _evaluate,
    "evaluate_preference": _evaluate,
    "evaluate_online": _evaluate,
}
"""What each stage that has a model holds, moment by moment."""
