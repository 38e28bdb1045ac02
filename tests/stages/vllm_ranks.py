"""One of two ranks, each with a vLLM of its own, which takes weights of all ranks through memory.

test_vllm.py starts both, and looks at what they say. A line is what was asked of this rank's vLLM,
and what came of it: answers by weights that came through memory are those by the same weights from
a folder, whether the learner is whole or spread over the ranks.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

from stages.context import Context, ShareDone, StageError
from stages.contracts.precision import Precision
from stages.contracts.rollout import Engine
from stages.contracts.sharding import Sharding
from stages.engines.generation.generator import GeneratorSettings, Request, Sampling
from stages.engines.generation.resident_sampler import ResidentSampler
from stages.engines.generation.vllm_generator import VllmGenerator
from stages.engines.models.folders import load_policy
from stages.engines.processes.ranks import join
from stages.engines.training.learner import Optimization
from stages.engines.training.learners import open_learner

REQUESTS = [Request([1, 5, 6 + i], seed=i) for i in range(3)]
LEARNERS = {"whole": Sharding.NONE, "spread": Sharding.FSDP}
CONFIG = SimpleNamespace(
    precision=Precision.FLOAT32,
    online=SimpleNamespace(overlap=False),
    rollout=SimpleNamespace(batch_size=4, engine=Engine.VLLM),
)


def answers(generator):
    completions = generator.generate(REQUESTS, max_new_tokens=8, sampling=Sampling())
    return generator.policy_hash, [(each.ids, each.logprobs) for each in completions]


def sampler_of(ctx, ranks, folder, sharding, generator, hasher):
    ctx.sharding = sharding
    learner = open_learner(ctx, ranks, load_policy(folder), Optimization(1e-3, 1.0))
    sampler = ResidentSampler(CONFIG, folder, learner, ctx, hasher, 64)
    sampler._vllm = generator  # one that has started: they take long
    return sampler


def main(root, rank, say):
    folders = {name: root / name for name in ("old", *LEARNERS)}
    ctx = Context("test", None, 3, root / f"job-{rank}", rank=rank, world=2)
    ctx.heartbeats = root / "heartbeats"
    settings = GeneratorSettings("cpu", Precision.FLOAT32, 4, longest=64)
    with (
        join(ctx) as ranks,
        ThreadPoolExecutor(1) as hasher,
        closing(VllmGenerator(folders["old"], settings)) as generator,
    ):
        for name, sharding in LEARNERS.items():
            sampler = sampler_of(ctx, ranks, folders[name], sharding, generator, hasher)
            sampler.take()
            through_memory = (sampler.policy_hash(), answers(generator)[1])
            generator.load(folders["old"])
            others = answers(generator)
            generator.load(folders[name])
            say(name, [through_memory == answers(generator), through_memory != others])
        if rank == 1:
            call = generator._call
            generator._call = lambda name, *given: name == "load_piece" or call(name, *given)
        try:
            sampler_of(ctx, ranks, folders["whole"], Sharding.NONE, generator, hasher).take()
        except StageError as error:
            say("kept old weights", str(error))
            say("hash", generator.policy_hash)


if __name__ == "__main__":
    root, rank = Path(sys.argv[1]), int(sys.argv[2])
    with (root / f"said-{rank}").open("w") as said, suppress(ShareDone):
        main(root, rank, lambda *line: print(json.dumps(line), file=said, flush=True))
