"""One of two ranks that sample as one: the vLLM of the first has a worker for each of them.

test_vllm.py starts both, and looks at what they say. Answers by weights that came through memory,
each rank's to its own worker, are those by the same weights from a folder, which all workers read.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

from stages.context import Context, ShareDone, StageError
from stages.contracts.precision import Precision
from stages.contracts.sharding import Sharding
from stages.engines.generation.generator import GeneratorSettings, Sampling
from stages.engines.generation.resident_sampler import Neighbour
from stages.engines.generation.sampling import SamplingTask, generate_all
from stages.engines.generation.vllm_generator import VllmGenerator
from stages.engines.generation.vllm_start import NodeWorkers
from stages.engines.processes.ranks import join
from tests.stages.vllm_ranks import LEARNERS, REQUESTS, answers, sampler_of

TASK = SamplingTask(REQUESTS, 8, Sampling(), slots=4, describe=str)


def main(root, rank, say):
    folders = {name: root / name for name in ("old", *LEARNERS)}
    ctx = Context("test", None, 3, root / f"job-{rank}", rank=rank, world=2, tensor_parallel=2)
    ctx.heartbeats = root / "heartbeats"
    with join(ctx) as ranks, ThreadPoolExecutor(1) as hasher:
        settings = GeneratorSettings.of_job(ctx, Precision.FLOAT32, 4, longest=64)
        group = ranks.sampling_group
        group.agree_to_open(True)
        workers = NodeWorkers(folders["old"], settings) if rank and group.num_nodes > 1 else None
        if workers:
            say("workers of the second node", [each.rank for each in workers._executor.workers])
        with closing(
            Neighbour(group, "cpu", workers) if rank else VllmGenerator(folders["old"], settings)
        ) as generator:
            for name, sharding in LEARNERS.items():
                sampler = sampler_of(ctx, ranks, folders[name], sharding, generator, hasher)
                sampler.take()
                policy_hash = sampler.policy_hash()
                sampled = generate_all(replace(ctx, parts={}), sampler.opened, TASK)
                given = [(each.ids, each.logprobs) for each in sampled.completions]
                say(f"rows of {name}", [policy_hash, given])
                if not rank:
                    generator.load(folders["old"])
                    others = answers(generator)[1]
                    generator.load(folders[name])
                    from_files = answers(generator)
                    say(name, [from_files == (policy_hash, given), from_files[1] != others])
            if rank:
                call, *rest = generator._receiver

                def keep_old(method, *given):
                    call(method, *([[]] if method == "load_piece" else given))

                generator._receiver = (keep_old, *rest)
            try:
                sampler_of(ctx, ranks, folders["whole"], Sharding.NONE, generator, hasher).take()
            except StageError as error:
                say("kept old weights", str(error))
                if not rank:
                    say("hash", generator.policy_hash)


if __name__ == "__main__":
    root, rank = Path(sys.argv[1]), int(sys.argv[2])
    with (root / f"said-{rank}").open("w") as said, suppress(ShareDone):
        main(root, rank, lambda *line: print(json.dumps(line), file=said, flush=True))
