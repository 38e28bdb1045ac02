"""Bytes that one model takes on a GPU while it learns, reads and samples.

What is counted is what torch allocates at the peak, plus the CUDA context. The caching allocator
reserves some more where there is room and gives it back before it fails, so the sum is what a GPU
must have and not what it will show. benchmarks/results/memory.json has the peaks of 135M, 1.1B,
5.9B and 8B weights on an H200; a test holds every one of them within 15 %. No constant is fitted to
a cell: activations are the tensors that autograd keeps of a layer, counted in the code that makes
them, and the rest follows from the number of weights.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from stages.contracts.precision import Precision
from stages.contracts.sharding import Offload, Sharding
from stages.memory.shape import ModelShape

GIB = 2**30
BYTES = {Precision.FLOAT32: 4, Precision.BFLOAT16: 2}
FLOAT32 = 4
CHUNK_TOKENS, CHUNK_LOGITS, COMPILED_TOKENS = 512, 2**28, 4096
"""As in engines/forward/head.py; a test compares them."""
PREFILL_TOKENS, CACHE_BLOCK = 16_384, 64
"""As in engines/generation/llama/decoder.py; a test compares them."""
BUCKET_ELEMENTS = 50_000_000
"""As in engines/processes/deepspeed_engine.py; a test compares them."""
CUDA_CONTEXT = round(0.82 * GIB)
"""What the driver has in use before torch has allocated anything (memory.json, `sleep`)."""
CUDA_LIBRARIES = round(0.1 * GIB)
"""cuBLAS's workspaces: what is allocated at rest beyond weights and moments (memory.json). Decoding
has another set, for the stream that its graphs are recorded on."""


class Part(StrEnum):
    """What memory is taken by."""

    WEIGHTS = "weights"
    """What the model computes with."""
    MASTERS = "masters"
    """The float32 weights that learn, where the model computes with a rounded copy."""
    GRADIENTS = "gradients"
    MOMENTS = "moments"
    """AdamW's."""
    AVERAGE = "average"
    """Of the weights, with ema_decay."""
    GATHERED = "gathered"
    """Of a model that is spread: the layers that are whole just now, and buckets of gradients."""
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    """Of a chunk of tokens, with all that is derived from them, and the head's own gradient."""
    CACHE = "cache"
    """Keys and values."""
    RESERVED = "not for vLLM"
    """What `generator_memory` keeps from it."""
    SAMPLER = "sampler copy"
    """Weights that only the sampler has."""
    CRITIC = "critic"
    """Its weights, masters, gradients and moments."""
    REFERENCE = "reference"
    REWARD_MODEL = "reward model"
    CLASSIFIER = "classifier"
    """A finished one, named in `rewards`."""
    TEACHER = "teacher"
    LOADING = "loading"
    """What a model takes on its way into a GPU."""
    SAVING = "saving"
    """What is gathered to be written."""
    PROCESSES = "processes"
    """Python with its libraries; on a GPU the CUDA context and libraries."""


Parts = Counter[Part]
"""Bytes by part."""

SPREAD: dict[str, tuple[Part, ...]] = {
    "none": (),
    "zero1": (Part.MASTERS, Part.MOMENTS, Part.AVERAGE),
    "zero2": (Part.MASTERS, Part.MOMENTS, Part.AVERAGE, Part.GRADIENTS),
    "zero3": (Part.MASTERS, Part.MOMENTS, Part.AVERAGE, Part.GRADIENTS, Part.WEIGHTS),
    "fsdp": (Part.MASTERS, Part.MOMENTS, Part.AVERAGE, Part.GRADIENTS, Part.WEIGHTS),
}
"""What a rank holds only its part of, by `sharding`."""
FSDP = "fsdp"
"""Its parts are the float32 weights, from which each layer is gathered and rounded."""
PIECE_BYTES = 2**32
"""Of the moments that come from the host together, without sharding; two of them are there."""


@dataclass(frozen=True)
class Layout:
    """How a stage runs: the profile's fields of the same names."""

    on_gpu: bool = True
    nodes: int = 1
    tasks_per_node: int = 1
    sharding: Sharding = Sharding.NONE
    offload: Offload = Offload.NONE
    sequence_parallel: int = 1
    samplers: int = 0
    tensor_parallel: int = 1
    generator_memory: float = 0.9
    gpu_memory: int = 0
    """Bytes; 0: not known."""
    micro_tokens: int = 8192
    compile: bool = False
    checkpoint_activations: bool = False
    has_vllm: bool = True
    """Whether vLLM is installed where the job runs."""

    @property
    def world(self) -> int:
        """Ranks that train together."""
        return max(1, self.nodes * self.tasks_per_node - self.samplers)

    @property
    def spreads_readers(self) -> bool:
        """Whether models that only answer are spread over the ranks, too."""
        return self.sharding.spreads_weights and self.world > 1

    @property
    def is_compiled(self) -> bool:
        """What DeepSpeed spreads is not."""
        by_torch = self.sharding.value in (Sharding.NONE, FSDP)
        return self.compile and by_torch and self.sequence_parallel == 1


@dataclass(frozen=True)
class Model:
    """A model as a stage uses it."""

    shape: ModelShape
    precision: Precision
    scalar: bool = False
    """Whether a scalar head stands in place of the output head: a reward model, a critic."""
    adapter: int = 0
    """Weights of its LoRA adapter; 0: all weights learn."""
    averaged: bool = False
    merged: bool = False
    """Whether it comes from an adapter's folder, and is put together where it is loaded."""
    alone: bool = False
    """Whether every rank loads all of it, though the ranks share it afterwards."""

    @property
    def reads_rows(self) -> bool:
        """Whether a rank that is to hold a part of it reads no more than that."""
        return self.shape.by_rows and not self.merged and not self.alone

    @property
    def weights(self) -> int:
        whole = self.shape.backbone if self.scalar else self.shape.weights
        return whole + self.adapter

    @property
    def trained(self) -> int:
        return self.adapter or self.weights

    @property
    def bytes(self) -> int:
        return BYTES[self.precision] * self.weights


@dataclass(frozen=True)
class State:
    """What a learner keeps between two steps, and its gradients, in one process."""

    gpu: Parts
    gradients: int
    host: Parts

    @property
    def total(self) -> int:
        return self.gpu.total() + self.gradients


def learner_state(model: Model, layout: Layout) -> State:
    """Of one rank (docs/engines.md has the bytes per weight)."""
    is_spread = layout.sharding is not Sharding.NONE
    is_fsdp = layout.sharding.value == FSDP
    rounds = model.precision is not Precision.FLOAT32
    whole = {
        Part.WEIGHTS: 0 if is_fsdp else model.bytes,
        # A model in float32 learns with the weights that it computes with; ZeRO has a copy.
        Part.MASTERS: FLOAT32 * model.trained if rounds or is_spread else 0,
        Part.MOMENTS: 2 * FLOAT32 * model.trained,
        Part.AVERAGE: FLOAT32 * model.trained if model.averaged else 0,
        Part.GRADIENTS: FLOAT32 * model.trained,
    }
    if is_fsdp:
        whole[Part.MASTERS] = FLOAT32 * model.weights
    spread = SPREAD[layout.sharding.value]
    held = {part: size // (layout.world if part in spread else 1) for part, size in whole.items()}
    moved: tuple[Part, ...] = ()
    if layout.offload is not Offload.NONE:
        # Without sharding the moments alone wait on the host; DeepSpeed's optimizer works there.
        moved = (Part.MASTERS, Part.MOMENTS, Part.GRADIENTS) if is_spread else (Part.MOMENTS,)
    if layout.offload is Offload.ALL:
        moved = (*moved, Part.WEIGHTS)
    gpu = Counter({part: size for part, size in held.items() if part not in moved})
    host = Counter({part: held[part] for part in moved})
    if is_spread:
        gpu[Part.GATHERED] = _gathered(model, layout)
    if model.adapter and rounds and not is_spread:
        # Weights that do not learn are needed to be saved again, in float32.
        host[Part.MASTERS] += FLOAT32 * (model.weights - model.adapter)
    return State(gpu, gpu.pop(Part.GRADIENTS, 0), host)


def _gathered(model: Model, layout: Layout) -> int:
    shape, low = model.shape, BYTES[model.precision]
    is_fsdp = layout.sharding.value == FSDP
    # FSDP adds up the gradients of a layer at once, ZeRO those of a bucket.
    at_once = shape.layer_weights if is_fsdp else BUCKET_ELEMENTS
    buckets = FLOAT32 * min(at_once, model.trained)
    if Part.WEIGHTS not in SPREAD[layout.sharding.value]:
        return buckets
    # One layer computes while the next one is gathered; outside the layers all is whole.
    head = 0 if model.scalar else low * shape.vocabulary * shape.width
    embedding = low * shape.vocabulary * shape.width if is_fsdp and not shape.tied else 0
    return buckets + head + embedding + 2 * low * shape.layer_weights


def read_weights(model: Model, layout: Layout) -> int:
    """Of a model that only answers: all of them, or a rank's part and what a pass has gathered.

    That are, as of a learner, two layers and what is outside the layers.
    """
    if not layout.spreads_readers:
        return model.bytes
    shape, low = model.shape, BYTES[model.precision]
    tables = (0 if model.scalar else 1) + (0 if shape.tied and not model.scalar else 1)
    gathered = tables * shape.vocabulary * shape.width + 2 * shape.layer_weights
    return model.bytes // layout.world + low * gathered


def activations(model: Model, tokens: int, layout: Layout) -> tuple[int, int]:
    """Bytes kept of all layers for the backward pass, and what one layer has while it computes.

    Of a token in a layer autograd keeps, in numbers of the model's type: both norms' results and
    what the linear layers are given (2 x 2 widths), queries and the attention's result (2 x
    q_width), keys and values (2 x kv_width), gate, its activation, up and their product (4 x
    inner); and in float32 what the norms are given (2 widths). Frozen weights spare the norms'
    results. Compiled, a layer keeps its two inputs in the model's type, computes one of the four
    inner ones again, and no float32.
    """
    shape, low = model.shape, BYTES[model.precision]
    attention = low * (2 * shape.q_width + 2 * shape.kv_width)
    tokens = -(-tokens // layout.sequence_parallel)
    if layout.is_compiled:
        of_layer = low * 4 * shape.width + attention + low * 3 * shape.inner
    else:
        norms = 2 * FLOAT32 + low * (2 if model.adapter else 4)
        of_layer = norms * shape.width + attention + low * 4 * shape.inner
    kept = low * shape.width if layout.checkpoint_activations else of_layer
    return tokens * shape.layers * kept, tokens * of_layer


def logits(model: Model, tokens: int, layout: Layout, *, learning: bool) -> int:
    """What reading log-probs off the output head takes, chunk by chunk.

    Logits, logits over the temperature, log-probs, probabilities and their product are there at
    once, in float32; in the backward pass of a further chunk also the gradient of the one before,
    and that rounded. Compiled, three of them are never written.
    """
    shape, low = model.shape, BYTES[model.precision]
    hidden = 2 * low * tokens * shape.width
    if model.scalar:
        return hidden
    chunk = CHUNK_TOKENS
    if layout.on_gpu:
        chunk *= max(1, CHUNK_LOGITS // (shape.vocabulary * CHUNK_TOKENS))
        chunk = min(chunk, COMPILED_TOKENS) if layout.is_compiled else chunk
    of_token = FLOAT32 * shape.vocabulary
    total = (3 if layout.is_compiled else 5) * of_token * min(chunk, tokens) + hidden
    if learning and tokens > chunk and not layout.is_compiled:
        after = min(chunk, tokens - chunk)
        total = max(total, round(of_token * (1.5 * chunk + 5 * after)) + hidden)
    if learning and not model.adapter:
        # The head's gradient: its sum over the chunks, and what is added to it.
        total += 2 * FLOAT32 * shape.vocabulary * shape.width
    return total


def reading(model: Model, tokens: int, layout: Layout) -> Parts:
    """A pass without gradients, beside the weights: one layer at a time, then the head."""
    shape, low = model.shape, BYTES[model.precision]
    # The residual stream, a norm in float32, and the feed-forward layer's inner ones.
    passing = 2 * low * shape.width + 2 * FLOAT32 * shape.width + 4 * low * shape.inner
    of_layer = -(-tokens // layout.sequence_parallel) * passing
    of_head = logits(model, tokens, layout, learning=False)
    if of_head > of_layer:
        return Counter({Part.LOGITS: of_head})
    return Counter({Part.ACTIVATIONS: of_layer})


def learning(models: list[Model], tokens: int, layout: Layout, *, accumulated: bool) -> list[Parts]:
    """The moments of a step that may need most, beside what its learners keep between steps.

    `accumulated`: gradients of an earlier pass of the step are there when the pass begins. If not,
    they grow as the activations go, so that the peak is at one end of the backward pass.
    """
    states = [learner_state(model, layout) for model in models]
    gradients = sum(state.gradients for state in states)
    pairs = [activations(model, tokens, layout) for model in models]
    kept, layer = sum(kept for kept, _ in pairs), sum(layer for _, layer in pairs)
    head = sum(logits(model, tokens, layout, learning=True) for model in models)
    at_head = Counter({Part.ACTIVATIONS: kept, Part.LOGITS: head})
    at_top = Counter({Part.ACTIVATIONS: kept + (layer if layout.checkpoint_activations else 0)})
    whole = Counter({Part.GRADIENTS: gradients})
    moments = sum(state.host[Part.MOMENTS] for state in states)
    comes = layout.sharding is Sharding.NONE and moments
    stepping = whole + Counter({Part.MOMENTS: min(moments, 2 * PIECE_BYTES) if comes else 0})
    if accumulated:
        return [at_head + whole, at_top + whole, stepping]
    # The embedding's gradient comes last, in the model's type, before it is added up.
    last = max(BYTES[m.precision] * m.shape.vocabulary * m.shape.width for m in models)
    at_end = Counter({Part.ACTIVATIONS: layer, Part.GRADIENTS: gradients + last})
    return [at_head, at_top, at_end, stepping]


@dataclass(frozen=True)
class Sampling:
    """What is decoded together."""

    slots: int
    samples: int
    """Of each prompt; they share the pass over it."""
    longest: int
    """Tokens of a prompt and its response."""


def torch_sampler(model: Model, sampling: Sampling, layout: Layout, *, owns_weights: bool) -> Parts:
    """Beside the weights: the cache, joined weights where they are a copy, a pass over prompts."""
    slots, longest = sampling.slots, sampling.longest
    shape, low = model.shape, BYTES[model.precision]
    length = -(-longest // CACHE_BLOCK) * CACHE_BLOCK
    # Padded prompts that are admitted together; at least one, however long.
    prompts = min(max(PREFILL_TOKENS, longest), -(-slots // sampling.samples) * longest)
    mixing = 3 * shape.q_width + 4 * shape.kv_width
    of_prompts = prompts * low * (2 * shape.width + mixing + 3 * shape.inner)
    of_step = 2 * FLOAT32 * slots * shape.vocabulary
    return Counter(
        {
            Part.CACHE: slots * length * shape.cached_numbers * low,
            Part.SAMPLER: 0 if owns_weights else low * shape.joined_weights,
            Part.ACTIVATIONS: max(of_prompts, of_step),
            Part.PROCESSES: CUDA_LIBRARIES if layout.on_gpu else 0,
        }
    )


def vllm_sampler(model: Model, sampling: Sampling, layout: Layout) -> Parts:
    """The least that vLLM starts with on each of its GPUs: weights, one sequence, a pass.

    It fills its share of the GPU with cache; this is what its share must have room for. From what
    it documents, not measured here.
    """
    shape, low, width = model.shape, BYTES[model.precision], layout.tensor_parallel
    kv_heads = -(-shape.kv_heads // width)
    cached = 2 * shape.layers * kv_heads * shape.head * low
    passing = PREFILL_TOKENS * low * (4 * shape.width + 3 * shape.inner // width)
    return Counter(
        {
            Part.WEIGHTS: model.bytes // width,
            Part.CACHE: sampling.longest * cached,
            Part.ACTIVATIONS: passing,
            Part.LOGITS: 3 * FLOAT32 * sampling.slots * shape.vocabulary,
        }
    )
