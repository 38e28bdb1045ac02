"""What an RL step would take where it has not been measured: a cost model, on paper.

One GRPO step on nodes of eight H200: every replica decodes its share of the responses, the ranks
compute the reference's log-probs and take one optimizer step over them. Staged, the new policy then
goes through the file system, from job to job; online, through memory, from the ranks that learn to
those that sample. Rates are measured (scaling.py reads them); networks, disks and nodes are
CLUSTER's. Whether a row can be run is what the program says of it (layouts.py).
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.layouts import Row, refusals, use_of
from stages.contracts.sharding import Sharding
from stages.memory.shape import ModelShape, decoder

BF16, FLOAT32 = 2, 4
STATE = 3 * FLOAT32
"""Bytes a weight of a checkpoint, and of what an iteration leaves for the next: float32 weights and
two moments."""
CHECKED = FLOAT32 + FLOAT32 + STATE
"""Bytes a weight that the jobs of an iteration read to check them: rollout the policy, score the
reference, policy_update the policy with its moments."""
RECOMPUTED = 4 / 3
"""Activation checkpointing: one forward pass more."""


@dataclass(frozen=True)
class Model:
    """A decoder; of a mixture of experts, `active` weights work on a token."""

    name: str
    shape: ModelShape
    active: float = 0.0
    """0: all."""

    @property
    def total(self) -> int:
        return self.shape.weights

    @property
    def working(self) -> float:
        return self.active or self.total

    @property
    def kv_bytes(self) -> int:
        """Of one token in the cache."""
        return self.shape.cached_numbers * BF16


@dataclass(frozen=True)
class Cluster:
    """Nodes of eight H200. From data sheets, with what is usually reached of a network."""

    gpus_per_node: int = 8
    memory: float = 141e9
    usable: float = 0.85
    """Share of a GPU's memory that can be planned with."""
    peak: float = 989e12
    bandwidth: float = 4.8e12
    nvlink: float = 300e9
    """Bytes a second of a GPU inside a node, of 450 in the data sheet."""
    network: float = 40e9
    """Bytes a second of a GPU between nodes: 400 Gb/s each, of which four fifths."""
    allreduce_s: float = 12e-6
    """Least time of a small all-reduce inside a node."""
    host_memory: float = 2e12
    """Of a node."""
    shared_disk: float = 20e9
    """Bytes a second to or from all nodes together, of the file system that they share."""
    checkpoint_seconds: float = 1800
    """As the profile of online has it."""


@dataclass(frozen=True)
class Work:
    """One step: prompts x samples responses of full length, and one optimizer step over them."""

    prompts: int = 128
    samples: int = 16
    prompt_tokens: int = 512
    new_tokens: int = 2048
    micro_tokens: int = 16_384

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class Rates:
    """What was measured."""

    training_mfu: float
    """SFT at 1.1B, packed, uneven lengths, one H200 (training.json)."""
    decoding_share: float
    """Of the memory bandwidth, decoding at 1.1B with 512 slots (generation.json)."""
    write_gb_per_s: float
    """Eight ranks of a node, hashes included (artifacts.json)."""
    read_gb_per_s: float
    """Eight ranks of a node, from the disk (artifacts.json)."""
    cached_gb_per_s: float
    """Eight ranks of a node, from the page cache (artifacts.json)."""
    sampler_hash_gb_per_s: float
    """At least: rounded weights at 8B, while the model answers, on a host's 16 cores (online.json).
    """
    vllm_load_gb_per_s: float
    """Rounded weights at 8B, from a rank to the vLLM on its GPU (weight_transfer.json)."""
    vllm_compare_gb_per_s: float
    """The same weights once more, compared with what it holds (weight_transfer.json)."""


@dataclass(frozen=True)
class Plan:
    """How a model is laid out, and what a step takes."""

    model: str
    form: str
    nodes: int
    sharding: str
    tensor_parallel: int
    samplers: int
    gpu_gb: float
    host_gb: float
    generate_s: float
    score_s: float
    train_s: float
    bound_by: str
    """What training waits for."""
    exchange_s: float
    checkpoint_s: float
    """Of online: its share of a checkpoint."""
    step_s: float
    exchange_percent: float
    """Of a step, checkpoints included."""
    stops: str
    """Why it cannot be run today, if so."""


CLUSTER, WORK = Cluster(), Work()
MODELS = (
    Model("7B", decoder(3584, 18_944, 28, 28, 4, 152_064)),
    Model("70B", decoder(8192, 28_672, 80, 64, 8, 128_256)),
    # In every other layer a token meets one of 128 experts and one that all share.
    Model(
        "400B MoE", ModelShape(5120, 16_384, 48, 40, 8, 128, 202_048, False, 8_290_000_000), 17e9
    ),
)

SHARDINGS = (Sharding.NONE, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)


class Form(StrEnum):
    """How the parts of a step follow one another."""

    STAGED = "staged"
    ONLINE = "online"


def plans(model: Model, found: Rates, work: Work = WORK) -> list[Plan]:
    """On the fewest nodes that hold its training, and on twice and four times as many."""
    nodes = 1
    while staged_row(model, nodes, work) is None:
        nodes *= 2
    sizes = (nodes, 2 * nodes, 4 * nodes)
    return [plan(model, form, number, found, work) for form in Form for number in sizes]


def plan(model: Model, form: Form, nodes: int, found: Rates, work: Work) -> Plan:
    row = staged_row(model, nodes, work) if form is Form.STAGED else online_row(model, nodes, work)
    assert row is not None
    width = row.tensor_parallel
    generating = generation_s(model, replicas_of(row.samplers or row.gpus, width), row, found, work)
    arithmetic, network = training_s(model, row, found, work)
    training = max(arithmetic, network)
    scoring = arithmetic / RECOMPUTED / 3  # forward alone
    computing = generating + scoring + training
    checkpointing = 0.0
    if form is Form.STAGED:
        exchanging = staged_exchange_s(model, nodes, width, found)
    else:
        exchanging = online_exchange_s(model, nodes, width, found, generating)
        due = min(1.0, (computing + exchanging) / CLUSTER.checkpoint_seconds)
        checkpointing = write_s(model, nodes, found) * due
    step = computing + exchanging + checkpointing
    use = use_of(row)
    return Plan(
        model=model.name,
        form=form.value,
        nodes=nodes,
        sharding=row.sharding.value,
        tensor_parallel=width,
        samplers=row.samplers,
        gpu_gb=round(use.gpu_needed / 1e9),
        host_gb=round(use.needs.host.total / 1e9),
        generate_s=round(generating, 1),
        score_s=round(scoring, 1),
        train_s=round(training, 1),
        bound_by="arithmetic" if arithmetic >= network else "network",
        exchange_s=round(exchanging, 1),
        checkpoint_s=round(checkpointing, 1),
        step_s=round(step),
        exchange_percent=round(100 * (exchanging + checkpointing) / step, 1),
        stops="; ".join(stops(model, row)),
    )


def stops(model: Model, row: Row) -> list[str]:
    """What of today's program does not go that far."""
    reasons = refusals(row)
    if model.active:
        reasons.append("vLLM's experts cannot be compared with what they were loaded from")
    return reasons


def row_of(
    model: Model,
    form: Form,
    nodes: int,
    kind: Sharding,
    width: int,
    slots: int,
    work: Work,
    samplers: int = 0,
) -> Row:
    return Row(
        shape=model.shape,
        online=form is Form.ONLINE,
        nodes=nodes,
        gpus_per_node=CLUSTER.gpus_per_node,
        gpu_memory=CLUSTER.memory,
        host_memory=CLUSTER.host_memory,
        sharding=kind,
        tensor_parallel=width,
        samplers=samplers,
        slots=slots,
        samples=work.samples,
        sequences=work.sequences,
        new_tokens=work.new_tokens,
        length=work.length,
        micro_tokens=work.micro_tokens,
    )


def staged_row(model: Model, nodes: int, work: Work) -> Row | None:
    """With the first sharding that fits training, as docs/engines.md advises."""
    width = tensor_parallel(model, work)
    slots = staged_slots(model, replicas_of(gpus_of(nodes), width), width, work)
    for kind in SHARDINGS:
        row = row_of(model, Form.STAGED, nodes, kind, width, slots, work)
        if use_of(row).gpu_needed <= CLUSTER.memory * CLUSTER.usable:
            return row
    return None


def online_row(model: Model, nodes: int, work: Work) -> Row:
    """With the most slots over a node's GPUs that fit; if none do, with samplers.

    Where a sampler spans GPUs, these may be more than hold the weights alone: what learns is there,
    too. Of as many slots it is the most GPUs, which read the weights in the least time, and the
    first sharding.
    """
    width = tensor_parallel(model, work)
    widths = [width]
    while width > 1 and widths[-1] < CLUSTER.gpus_per_node:
        widths.append(2 * widths[-1])
    room = CLUSTER.memory * CLUSTER.usable
    fitting = []
    for width in widths:
        rows = []
        slots = staged_slots(model, replicas_of(gpus_of(nodes), width), width, work)
        while slots:
            of_kinds = ((model, Form.ONLINE, nodes, kind, width, slots, work) for kind in SHARDINGS)
            rows += [row_of(*each) for each in of_kinds]
            slots //= 2
        first = next((row for row in rows if use_of(row).gpu_needed <= room), None)
        fitting += [first] if first else []
    if not fitting:
        apart = rows_with_samplers(model, nodes, work)
        for memory in (room, CLUSTER.memory):
            fitting += [row for row in apart if use_of(row).gpu_needed <= memory]
        return [*fitting, *apart[-1:], rows[len(SHARDINGS) - 1]][0]
    return max(fitting, key=lambda row: (row.slots / row.tensor_parallel, row.tensor_parallel))


def rows_with_samplers(model: Model, nodes: int, work: Work) -> list[Row]:
    """From the fewest that decode all responses at once, at most half of the GPUs, down to one."""
    width = tensor_parallel(model, work)
    numbers = range(1, 1 + gpus_of(nodes) // 2 // width)
    slots = {number: staged_slots(model, number, width, work) for number in numbers}
    enough = [number for number in numbers if slots[number] * number >= work.sequences]
    most = min(enough, default=max(numbers, default=0))
    kind = SHARDINGS[-1]
    return [
        row_of(model, Form.ONLINE, nodes, kind, width, slots[number], work, number * width)
        for number in range(most, 0, -1)
    ]


def tensor_parallel(model: Model, work: Work) -> int:
    """The fewest GPUs that hold the weights and a cache for 16 sequences."""
    needed = BF16 * model.total + 16 * model.kv_bytes * work.length
    width = 1
    while width * CLUSTER.memory * CLUSTER.usable < needed:
        width *= 2
    return width


def staged_slots(model: Model, replicas: int, width: int, work: Work) -> int:
    """Sequences that one of some replicas decodes at once, on GPUs of its own."""
    share = math.ceil(work.sequences / replicas)
    room = width * CLUSTER.memory * CLUSTER.usable - BF16 * model.total
    return min(share, int(room / (model.kv_bytes * work.length)))


def gpus_of(nodes: int) -> int:
    return nodes * CLUSTER.gpus_per_node


def replicas_of(gpus: int, width: int) -> int:
    return max(1, gpus // width)


def generation_s(model: Model, replicas: int, row: Row, found: Rates, work: Work) -> float:
    """Each step reads all weights (many tokens meet every expert) and every slot's cache."""
    width, slots = row.tensor_parallel, row.slots
    share = math.ceil(work.sequences / replicas)
    cached = slots * model.kv_bytes * (work.prompt_tokens + work.new_tokens / 2)
    reading = (BF16 * model.total + cached) / (width * CLUSTER.bandwidth * found.decoding_share)
    computing = 2 * model.working * slots / (width * CLUSTER.peak * found.training_mfu)
    talking = 2 * model.shape.layers * CLUSTER.allreduce_s if width > 1 else 0.0
    steps = work.new_tokens * math.ceil(share / slots)
    prefill = 2 * model.working * share * work.prompt_tokens
    rate = width * CLUSTER.peak * found.training_mfu
    return steps * (max(reading, computing) + talking) + prefill / rate


def training_s(model: Model, row: Row, found: Rates, work: Work) -> tuple[float, float]:
    """Seconds of arithmetic, and seconds on the network; the longer hides the other."""
    gpus, kind = row.gpus - row.samplers, row.sharding
    tokens = work.sequences * work.length
    per_token = 6 * model.working + 6 * model.shape.layers * model.shape.width * work.length
    arithmetic = RECOMPUTED * per_token * tokens / (gpus * CLUSTER.peak * found.training_mfu)
    passes = max(1, math.ceil(tokens / (gpus * work.micro_tokens)))
    # zero1 adds gradients up once a step; zero2 and zero3 in every pass; zero3 gathers weights
    # forward, again for the recomputed forward, and backward.
    reduced = 2 * FLOAT32 * model.total * (1 if kind in ("none", "zero1") else passes)
    gathered = 3 * BF16 * model.total * passes if kind == "zero3" else BF16 * model.total
    speed = CLUSTER.network if row.nodes > 1 else CLUSTER.nvlink
    return arithmetic, (reduced + gathered) / speed


def write_s(model: Model, nodes: int, found: Rates) -> float:
    """All ranks write and hash weights and moments, each its part."""
    speed = min(nodes * found.write_gb_per_s * 1e9, CLUSTER.shared_disk)
    return STATE * model.total / speed


def staged_exchange_s(model: Model, nodes: int, width: int, found: Rates) -> float:
    """What staged jobs add: the state is written once; every node reads all that its jobs read.

    It is read from the disk to be checked, by one process of a node, and from the page cache to be
    loaded: whole by every replica, of which score has as many as rollout, in parts by ranks.
    """
    checking = CHECKED * model.total / min(found.read_gb_per_s * 1e9, CLUSTER.shared_disk / nodes)
    replicas = replicas_of(CLUSTER.gpus_per_node, width)
    loaded = (2 * FLOAT32 * replicas + STATE / nodes) * model.total
    return write_s(model, nodes, found) + checking + loaded / (found.cached_gb_per_s * 1e9)


def online_exchange_s(
    model: Model, nodes: int, width: int, found: Rates, generating: float
) -> float:
    """All-gather of the rounded weights into the samplers, and what generation does not hide.

    Where a sampler spans GPUs it is vLLM's: each of them is given all weights, and then a second
    time to compare. They are hashed while all ranks generate, which ends no earlier than that: by
    rank 0 or, of what vLLM is given, by all ranks, each a part.
    """
    rounded = BF16 * model.total
    gathering = rounded / (CLUSTER.network if nodes > 1 else CLUSTER.nvlink)
    hashing = rounded / (found.sampler_hash_gb_per_s * 1e9)
    if width == 1:
        copying = 2 * rounded / CLUSTER.bandwidth
    else:
        gathering *= 2
        copying = rounded / (found.vllm_load_gb_per_s * 1e9)
        copying += rounded / (found.vllm_compare_gb_per_s * 1e9)
        hashing /= nodes
    return gathering + copying + max(0.0, hashing - generating)
