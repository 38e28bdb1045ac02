"""What ranks exchange between GPUs, as far as one GPU allows: by NCCL with one rank, which is as
many as it takes there, and by gloo between two processes.

This module, run by its name, is one of two ranks of a job whose second rank only samples.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from stages.context import Context
from stages.contracts.precision import Precision
from stages.contracts.rollout import Engine
from stages.contracts.sharding import Sharding
from stages.engines.generation.generator import Request, Sampling
from stages.engines.generation.resident_sampler import ResidentSampler
from stages.engines.generation.torch_generator import TorchGenerator
from stages.engines.models.folders import content_hash, load_policy
from stages.engines.processes.bridge import Bridge
from stages.engines.processes.heartbeats import Heartbeats
from stages.engines.processes.meeting import backend_of, open_store
from stages.engines.processes.ranks import ALONE
from stages.engines.training.learner import Optimization
from stages.engines.training.learners import open_learner
from tests.ports import free_port

pytestmark = pytest.mark.gpu
NAME = "tests.gpu.test_nccl"
DEVICE, BACKEND, CARRIER = "cuda:0", "nccl", "ProcessGroupNCCL"
TIMEOUT_S = 600
"""For two processes, of which each waits for the other."""
WAIT = timedelta(seconds=300)
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
REQUESTS = [Request([1, 5, 6 + i], seed=i) for i in range(12)]
OPTIONS = {"max_new_tokens": 24, "sampling": Sampling(temperature=1.2)}
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


@pytest.fixture
def _no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("policies")
    for seed in (0, 1):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(root / str(seed))
    return [root / "0", root / "1"]


def answers(generator):
    completions = generator.generate(REQUESTS, **OPTIONS)
    return [(each.ids, each.logprobs) for each in completions]


def expected(folder, precision):
    """What the weights of a folder answer, and their hash."""
    with closing(TorchGenerator(DEVICE, precision, 4)) as generator:
        generator.load(folder)
        return answers(generator), generator.policy_hash


@pytest.mark.usefixtures("_no_group_is_left")
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(
    "sharding", [Sharding.FSDP, pytest.param(Sharding.ZERO3, marks=NEEDS_DEEPSPEED)]
)
def test_spread_weights_are_gathered_into_the_tensors_of_the_decoder(
    folders, tmp_path, sharding, precision, record_property
):
    """Bit by bit, before and after they move on, and without a second copy of the model."""
    ctx = Context("test", None, 3, tmp_path, device=DEVICE, sharding=sharding)
    how = Optimization(1e-3, 1.0, precision=precision)
    learner = open_learner(ctx, ALONE, load_policy(folders[0], ctx.loads_on), how)
    assert dist.get_backend() == BACKEND
    config = SimpleNamespace(
        precision=precision,
        online=SimpleNamespace(overlap=False),
        rollout=SimpleNamespace(batch_size=4, engine=Engine.TORCH),
        algorithm=SimpleNamespace(is_policy_gradient=False),
    )
    with (
        ThreadPoolExecutor(1) as hasher,
        closing(ResidentSampler(config, folders[0], learner, ctx, hasher, 64)) as sampler,
    ):
        sampler.take()
        for folder in folders:
            other = load_policy(folder)
            moved = {f"weight.{name}": weight.data for name, weight in other.named_parameters()}
            learner.load(moved)
            before = _allocated()
            sampler.take()
            more = _peak() - before
            with sampler.opened() as generator:
                of_sampler = answers(generator)
            assert (of_sampler, sampler.policy_hash()) == expected(folder, precision)
            assert sampler.policy_hash() == content_hash(other, precision)
    weights = [weight.nbytes for weight in other.parameters()]
    record_property("bytes_beside_the_model", more)
    record_property("bytes_of_float32_weights", sum(weights))
    assert more < sum(weights) / 4, "one weight at a time"


def _allocated():
    if DEVICE == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak():
    if DEVICE == "cpu":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_the_way_to_samplers_on_other_gpus_is_nccl(folders, tmp_path):
    """Each weight of every type, as bytes; the group ends without its other members."""
    ctx = SimpleNamespace(rank=0, world=1, samplers=0, only_samples=False, device=DEVICE)
    bridge = Bridge(ctx, Heartbeats(tmp_path, 0, 1, 60), dist.HashStore(), WAIT)
    assert type(bridge._carrier).__name__ == CARRIER
    weights = _weights(folders[0])
    bridge.send(_forms(weights), iter(weights.items()))
    for name, weight in _weights(folders[0]).items():
        assert torch.equal(weight, weights[name]), name
    bridge.close()


def test_two_ranks_on_one_gpu_are_sent_weights_by_gloo(folders, tmp_path):
    """Nothing is lost on its way between GPU and host."""
    said = together("sends", folders[0], tmp_path)
    assert said[0] == said[1]
    assert len(said[0].split()) == len(_weights(folders[0]))


def test_nccl_refuses_two_ranks_on_one_gpu(folders, tmp_path):
    """So these meet by gloo, and vLLM's own NCCL transfer could not reach a worker on the GPU of
    the rank that gives it weights."""
    for said in together("asks nccl", folders[0], tmp_path):
        backend, _, answer = said.partition(" ")
        assert backend == "gloo"
        assert "invalid usage" in answer or "Duplicate GPU" in answer, answer


def _weights(folder):
    """Of several types, in the order in which they are sent."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    named = load_policy(folder).named_parameters()
    return {
        name: weight.data.to(DEVICE, types[index % 3]) for index, (name, weight) in enumerate(named)
    }


def _forms(weights):
    return [(name, weight.shape, weight.dtype) for name, weight in weights.items()]


def _digest(weight):
    raw = weight.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.tobytes()).hexdigest()


def together(what, folder, root):
    """What each of two processes has said."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = []
    try:
        for rank in range(2):
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", NAME, what, folder, root, str(rank), DEVICE],
                    cwd=Path(__file__).parents[2],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    encoding="utf-8",
                    env=os.environ | meeting | {"RANK": str(rank), "LOCAL_RANK": "0"},
                )
            )
        logs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
        assert not any(rank.returncode for rank in ranks), "\n".join(logs)[-4000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [(root / f"said-{rank}").read_text() for rank in range(2)]


def sends(folder, root, rank, store):
    """The first rank's weights, and what the second has got of them."""
    ctx = SimpleNamespace(rank=rank, world=1, samplers=1, only_samples=rank == 1, device=DEVICE)
    heartbeats = Heartbeats(root / "signs", rank, 2, 60)
    heartbeats.begin()
    bridge = Bridge(ctx, heartbeats, store, WAIT)
    weights = _weights(folder)
    forms = _forms(weights)
    if rank:
        digests = [_digest(weight) for _, weight in bridge.receive(forms)]
    else:
        bridge.send(forms, iter(weights.items()))
        digests = [_digest(weight) for weight in weights.values()]
    bridge.close()
    heartbeats.end()
    return " ".join(digests)


def asks_nccl(store, rank):
    """How two ranks of this GPU would meet, and what NCCL says to it."""
    chosen = backend_of(dist.PrefixStore("chosen", store), rank, 2, torch.device(DEVICE))
    group = dist.ProcessGroupNCCL(dist.PrefixStore("refused", store), rank, 2, WAIT)
    try:
        group.broadcast(torch.ones(4, device=DEVICE), 0).wait()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"{chosen} {error}"
    return f"{chosen} and NCCL took them"


def main(what, folder, root, rank):
    folder, root, rank = Path(folder), Path(root), int(rank)
    store = open_store(rank, 2, WAIT)
    said = sends(folder, root, rank, store) if what == "sends" else asks_nccl(store, rank)
    (root / f"said-{rank}").write_text(said)
    # Nobody leaves while the other still talks, and a group that was refused has no proper end.
    store.set(f"done-{rank}", "yes")
    store.wait(["done-0", "done-1"], WAIT)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    DEVICE = sys.argv.pop()
    main(*sys.argv[1:])
