"""Neighbouring ranks that sample as one: who of them samples, and over which GPUs."""

import os
import socket
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from stages.context import Context, StageError
from stages.contracts.precision import Precision
from stages.contracts.rollout import Engine
from stages.engines.generation.generator import GeneratorSettings
from stages.engines.generation.generators import open_generator
from stages.engines.generation.vllm_generator import VllmGenerator
from stages.engines.generation.vllm_process import VISIBLE
from stages.engines.processes.heartbeats import Heartbeats
from stages.engines.processes.parts import Pass, missing
from stages.engines.processes.ranks import connect_alone
from stages.engines.processes.sampling_group import Place, SamplingGroup, nodes_of, numbers_of
from tests.stages.test_generators import tiny_llama
from tests.stages.test_vllm_end import NeverWakes

GPUS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


def test_the_gpus_of_a_group_are_found_among_those_that_its_first_rank_sees():
    places = [Place("node", gpu) for gpu in GPUS[2:]]
    assert numbers_of(places, GPUS, 2) == [2, 3]
    assert numbers_of(places, (*GPUS[2:], "GPU-e"), 2) == [0, 1]
    assert numbers_of([Place("node", "")] * 2, (), 0) == []


def test_a_group_over_nodes_has_as_many_ranks_on_each():
    assert nodes_of([Place("one", "")] * 3, 0) == [range(3)]
    two = [Place(host, "") for host in ("one", "one", "two", "two")]
    assert nodes_of(two, 4) == [range(2), range(2, 4)]


@pytest.mark.parametrize("node", ["node12", None])
def test_a_group_meets_at_the_name_that_slurm_gives_its_first_node(monkeypatch, tmp_path, node):
    """What a machine calls itself need not resolve from other nodes."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost.in.a.container")
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    if node:
        monkeypatch.setenv("SLURMD_NODENAME", node)
    ctx = SimpleNamespace(ranks_per_sampler=1, rank=0, device="cpu")
    connect_alone("cpu")
    try:
        group = SamplingGroup(ctx, Heartbeats(tmp_path, 0, 1, 60), 0)
    finally:
        dist.destroy_process_group()
    assert group.host == (node or "localhost.in.a.container")


@pytest.mark.parametrize("hosts", ["one two one two", "one one one two", "one two two"])
def test_a_group_whose_nodes_vllm_could_not_number_is_refused(hosts):
    places = [Place(host, "") for host in hosts.split()]
    said = f"ranks 4 to {3 + len(places)} .* on {hosts.replace(' ', ', ')}, .*distribution: block"
    with pytest.raises(StageError, match=said):
        nodes_of(places, 4)


@pytest.mark.parametrize(
    ("places", "said"),
    {
        (("one", "GPU-c"), ("one", "GPU-c")): r"some of them have the same: set gpus_per_node",
        (("one", "GPU-c"), ("one", "GPU-z")): r"rank 2 does not see the GPU of rank 3: .*gpu-bind",
    }.items(),
)
def test_a_group_that_cannot_have_a_vllm_of_its_own_is_refused(places, said):
    with pytest.raises(StageError, match=said):
        numbers_of([Place(*place) for place in places], GPUS, 2)


@pytest.mark.parametrize(("visible", "seen"), [(None, "2,3"), ("4,5,6,7", "6,7")])
def test_the_engine_of_a_group_sees_its_gpus_in_their_order(monkeypatch, tmp_path, visible, seen):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=NeverWakes))
    others = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    monkeypatch.setattr(os, "environ", others | ({VISIBLE: visible} if visible else {}))
    group = SimpleNamespace(gpus=[2, 3], num_nodes=1, leaders=[7, 7], opening=nullcontext)
    settings = GeneratorSettings("cuda:2", Precision.FLOAT32, 4, tensor_parallel=2, group=group)
    VllmGenerator(tiny_llama(tmp_path), settings).close()
    assert NeverWakes.sees == (seen, "1")
    assert os.environ.get(VISIBLE) == visible


def test_the_torch_generator_does_not_span_ranks(tmp_path):
    settings = GeneratorSettings(
        "cpu", Precision.FLOAT32, 4, tensor_parallel=2, group=SimpleNamespace(gpus=[])
    )
    with pytest.raises(StageError, match=r"tensor_parallel .* is 2, .* set rollout\.engine: vllm"):
        open_generator(tiny_llama(tmp_path), Engine.TORCH, settings)


def test_the_first_rank_of_each_group_has_a_share_of_the_units(tmp_path):
    def share(rank):
        ctx = Context("a", None, 0, tmp_path, rank=rank, world=6, tensor_parallel=2, parts={})
        work = Pass("responses-", 70, 10, dict, ranks_per_unit=ctx.ranks_per_sampler)
        return [unit.start for unit in missing(ctx, work)]

    assert [share(rank) for rank in range(6)] == [[0, 30, 60], [], [10, 40], [], [20, 50], []]


def test_a_sampler_or_a_process_alone_is_no_group(tmp_path):
    alone = Context("a", None, 0, tmp_path, tensor_parallel=2)
    one_samples = Context("a", None, 0, tmp_path, world=2, samplers=1, tensor_parallel=2)
    two_sample = Context("a", None, 0, tmp_path, world=1, samplers=2, tensor_parallel=2)
    assert alone.ranks_per_sampler == one_samples.ranks_per_sampler == 1
    assert two_sample.ranks_per_sampler == 2
