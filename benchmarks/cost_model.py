"""What an RL step would take where it has not been measured: a cost model, on paper.

One GRPO step of the staged loop on nodes of eight H200: every replica decodes its share of the
responses, the ranks take one optimizer step over them, and the new policy goes through the file
system. Rates are measured (scaling.py reads them); networks and nodes are CLUSTER's, from data
sheets.
"""

import math
from dataclasses import dataclass

from stages.contracts.params import Params
from stages.contracts.sharding import Sharding
from stages.memory.model import Layout
from stages.memory.shape import ModelShape, decoder
from stages.memory.stage import needs
from stages.memory.work import Shapes

BF16, FLOAT32 = 2, 4
STATE = 3 * FLOAT32
"""Bytes a weight of what an iteration leaves for the next: float32 weights and two moments."""
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
    """One process, a checkpoint (promises.json)."""
    read_gb_per_s: float
    hash_gb_per_s: float
    """One process, over two files (promises.json)."""


@dataclass(frozen=True)
class Plan:
    """How a model is laid out, and what a step takes."""

    model: str
    nodes: int
    sharding: str
    tensor_parallel: int
    gpu_gb: float
    host_gb: float
    generate_s: float
    train_s: float
    bound_by: str
    """What training waits for."""
    exchange_s: float
    step_s: float
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


def plans(model: Model, found: Rates, work: Work = WORK) -> list[Plan]:
    """On the fewest nodes that hold it, and on twice and four times as many."""
    nodes = 1
    while sharding(model, nodes, work) is None:
        nodes *= 2
    return [plan(model, number, found, work) for number in (nodes, 2 * nodes, 4 * nodes)]


def plan(model: Model, nodes: int, found: Rates, work: Work) -> Plan:
    kind = sharding(model, nodes, work)
    assert kind is not None
    width = tensor_parallel(model, work)
    generating = generation_s(model, nodes, width, found, work)
    arithmetic, network = training_s(model, nodes, kind, found, work)
    exchanging = exchange_s(model, found)
    training = max(arithmetic, network)
    gpu, host = memory(model, nodes, kind, work)
    return Plan(
        model=model.name,
        nodes=nodes,
        sharding=kind.value,
        tensor_parallel=width,
        gpu_gb=round(gpu / 1e9),
        host_gb=round(host / 1e9),
        generate_s=round(generating, 1),
        train_s=round(training, 1),
        bound_by="arithmetic" if arithmetic >= network else "network",
        exchange_s=round(exchanging),
        step_s=round(generating + training + exchanging),
        stops=", ".join(stops(model, host)),
    )


def stops(model: Model, host: int) -> list[str]:
    """What of today's code does not go that far (docs/engines.md)."""
    reasons = []
    if model.active:
        reasons.append("vLLM's experts are not compared with the files")
    if host > CLUSTER.host_memory:
        reasons.append("a node has no room for what training keeps there")
    return reasons


def sharding(model: Model, nodes: int, work: Work) -> Sharding | None:
    """The first that fits, as docs/engines.md advises."""
    room = CLUSTER.memory * CLUSTER.usable
    for kind in SHARDINGS:
        if memory(model, nodes, kind, work)[0] <= room:
            return kind
    return None


def memory(model: Model, nodes: int, kind: Sharding, work: Work) -> tuple[int, int]:
    """Bytes of a GPU and of a node in training, as `lockstep plan` estimates them."""
    layout = Layout(
        nodes=nodes,
        tasks_per_node=CLUSTER.gpus_per_node,
        sharding=kind,
        micro_tokens=work.micro_tokens,
        checkpoint_activations=True,
    )
    params = Params.model_validate(
        {
            "precision": "bfloat16",
            "model": {"max_length": work.length},
            "rl": {"algorithm": "grpo", "reward": "verifier"},
            "rollout": {"samples": work.samples, "max_new_tokens": work.new_tokens},
            "policy_update": {"batch_size": work.sequences},
        }
    )
    found = needs("policy_update", params, Shapes(model.shape), layout)
    assert found is not None
    assert found.gpu is not None
    return found.gpu.total, found.host.total


def tensor_parallel(model: Model, work: Work) -> int:
    """The fewest GPUs that hold the weights and a cache for 16 sequences."""
    needed = BF16 * model.total + 16 * model.kv_bytes * work.length
    width = 1
    while width * CLUSTER.memory * CLUSTER.usable < needed:
        width *= 2
    return width


def generation_s(model: Model, nodes: int, width: int, found: Rates, work: Work) -> float:
    """Each step reads all weights (many tokens meet every expert) and every slot's cache."""
    replicas = max(1, nodes * CLUSTER.gpus_per_node // width)
    share = math.ceil(work.sequences / replicas)
    room = width * CLUSTER.memory * CLUSTER.usable - BF16 * model.total
    slots = min(share, int(room / (model.kv_bytes * work.length)))
    cached = slots * model.kv_bytes * (work.prompt_tokens + work.new_tokens / 2)
    reading = (BF16 * model.total + cached) / (width * CLUSTER.bandwidth * found.decoding_share)
    computing = 2 * model.working * slots / (width * CLUSTER.peak * found.training_mfu)
    talking = 2 * model.shape.layers * CLUSTER.allreduce_s if width > 1 else 0.0
    steps = work.new_tokens * math.ceil(share / slots)
    prefill = 2 * model.working * share * work.prompt_tokens
    rate = width * CLUSTER.peak * found.training_mfu
    return steps * (max(reading, computing) + talking) + prefill / rate


def training_s(
    model: Model, nodes: int, kind: Sharding, found: Rates, work: Work
) -> tuple[float, float]:
    """Seconds of arithmetic, and seconds on the network; the longer hides the other."""
    gpus = nodes * CLUSTER.gpus_per_node
    tokens = work.sequences * work.length
    per_token = 6 * model.working + 6 * model.shape.layers * model.shape.width * work.length
    arithmetic = RECOMPUTED * per_token * tokens / (gpus * CLUSTER.peak * found.training_mfu)
    passes = max(1, math.ceil(tokens / (gpus * work.micro_tokens)))
    # zero1 adds gradients up once a step; zero2 and zero3 in every pass; zero3 gathers weights
    # forward, again for the recomputed forward, and backward.
    reduced = 2 * FLOAT32 * model.total * (1 if kind in ("none", "zero1") else passes)
    gathered = 3 * BF16 * model.total * passes if kind == "zero3" else BF16 * model.total
    return arithmetic, (reduced + gathered) / (CLUSTER.network if nodes > 1 else CLUSTER.nvlink)


def exchange_s(model: Model, found: Rates) -> float:
    """What staged jobs add: rank 0 writes the state, it is hashed once, and read once by each."""
    gigabytes = STATE * model.total / 1e9
    speeds = (found.write_gb_per_s, found.hash_gb_per_s, found.read_gb_per_s)
    return sum(gigabytes / speed for speed in speeds)
