"""Stages without a model, for tests of what is around a stage: queues, jobs, shards, ranks.

Of a real one a fresh process imports libraries for five seconds. Only ranks that meet need torch.
"""

ONE_RANK = """
from contextlib import nullcontext


class OneRank:
    def same(self, value):
        return value

    def agree_to_stop(self, wanted, where):
        return wanted


def join(ctx):
    return nullcontext(OneRank())
"""
COUNT = """
import hashlib
import os
import time

from stages.context import Stopped


def run(config, inputs, out, ctx):
    state = ctx.scratch / "checkpoint-1"
    hold = ctx.folder.parents[3] / "hold"
    epochs = config.sft.epochs

    def save(step):
        if ctx.rank == 0:
            aside = state.with_suffix(".tmp")
            aside.write_text(f"{step} {made}")
            os.replace(aside, state)

    with join(ctx) as ranks:
        found = state.read_text().split() if state.exists() else ("0", "nothing")
        done, made = ranks.same(found)
        ctx.resume_at(int(done))
        if int(done):
            ctx.progress(int(done), epochs)
        saved = time.monotonic()
        for step in range(int(done), epochs):
            while step == epochs - 1 and hold.exists() and not ctx.should_stop():
                time.sleep(0.05)
            stop = ranks.agree_to_stop(ctx.should_stop(), f"step {step + 1}")
            if stop:
                save(step)
                raise Stopped(f"stopped after step {step}")
            if time.monotonic() - saved > ctx.checkpoint_seconds:
                save(step)
                saved = time.monotonic()
            time.sleep(0.05)
            made = hashlib.sha256(f"{made} {step}".encode()).hexdigest()
            ctx.log(step + 1, {"loss": 1.0})
            ctx.progress(step + 1, epochs, loss=1.0)
    for path in out.values():
        path.mkdir()
        (path / "done").write_text(made)
    return {"loss": 1.0}
"""
COUNTING_STAGE = ONE_RANK + COUNT
"""For sft: no libraries to import; its bytes show that each step was made once, in order."""
COUNT_TOGETHER = f"from stages.engines.processes.ranks import join\n{COUNT}"
"""Ranks that meet at every step as those that train do, without a model and its libraries."""
DIGESTING_STAGE = """
import hashlib

from stages.engines.processes.parts import Pass, collect, fill


def run(config, inputs, out, ctx):
    seen = hashlib.sha256(f"{config.model_dump_json()} {list(ctx.graph)}".encode())
    for name, given in sorted(inputs.items()):
        for path in sorted([given, *given.rglob("*")]):
            if path.is_file():
                seen.update(f"{name} {path.relative_to(given)} ".encode() + path.read_bytes())

    def digests(unit):
        return [hashlib.sha256(f"{seen.hexdigest()} {row}".encode()).hexdigest() for row in unit]

    work = Pass("digests", 8, 1, lambda: digests)
    fill(ctx, work)
    made = "".join(collect(ctx, work))
    for name, path in out.items():
        path.mkdir()
        (path / "digest").write_text(f"{name} {made}")
    return {"loss": 1.0}
"""
"""For any stage: no libraries to import; its bytes depend on all that it was given."""
ANSWER_BY_HASH = '''
import hashlib
from contextlib import closing

from stages.engines.generation.generator import Completion


class Hashes:
    """Stands for a policy: it needs no libraries, and answers by the request and its seed alone."""

    policy_hash = "0" * 32

    def generate(self, requests, *, max_new_tokens, sampling):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        digest = hashlib.sha256(f"{list(request.prompt_ids)} {request.seed}".encode()).digest()
        ids = [3 + byte % 8 for byte in digest[: 1 + digest[0] % 16]]
        return Completion(ids, [-1.0 / one for one in ids], digest[1] / 10, "stop")

    def close(self):
        pass


def opened(ctx, folder, engine, precision, slots, longest):
    return closing(Hashes())
'''
"""For rollouts: those of no model. All else is the stage's: how shards share, keep and merge."""
