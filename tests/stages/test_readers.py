"""Models that only answer, spread over ranks: the bytes of one process, whatever ends the ranks.

The ranks are forked once and go through all jobs; each test looks at what some of them left. This
file, run under the name RANK, is one such rank.
"""

import itertools
import json
import os
import runpy
import shutil
import signal
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from stages.context import RankLost, ShareDone, StageError, Stopped
from stages.contracts.precision import Precision
from stages.contracts.sharding import Sharding
from stages.engines.forward import inference
from stages.engines.models import readers
from stages.engines.models.folders import load_policy, load_scalar_model
from stages.engines.models.loaders import fresh
from stages.engines.models.lora import open_for_training
from stages.engines.models.tensor_files import StoredTensor
from stages.engines.processes.ranks import join
from tests.ports import free_port
from tests.stages.conftest import Runner, rewrite_weights
from tests.stages.forks import FORKS
from tests.stages.test_online import AskedAt
from tests.stages.test_spread import LORA, with_tied_head
from tests.waiting import TIMEOUT_S

RANK = "one_rank"
WORLD = 2
SCORE, EVALUATE, REFERENCE = "score@iter_001", "evaluate_sft", "reference_logprobs@dpo"
PREFERENCE = {"rl": {"preferences": {"dpo": {"policy": "sft"}}}}
SEVERAL_UNITS = {"rollout": {"batch_size": 40}}
BFLOAT16 = {"precision": "bfloat16"}
SOURCES = {
    "rewards": {"sums": {"kind": "maths"}},
    "score": {"weights": {"reward_model": 1.0, "verifier": 0.5, "sums": 0.5}},
}
"""Beside the model one in the stage's process, of which each rank has units, and one in another."""
TAKEN = {"reward_model": {"start": "folder", "folder": "models", "epochs": 0}}
ROWS = [
    {
        "prompt_id": str(number),
        "sample_index": 0,
        "prompt_ids": [3, 4, 5 + number],
        "response_ids": list(range(3, 6 + number)),
        "support": None,
        "loss_mask": None,
    }
    for number in range(5)
]


@dataclass(frozen=True)
class Job:
    """A stage, or a model of a folder that says the log-probs of the rows."""

    root: str
    address: str = ""
    changes: dict = field(default_factory=dict)
    model: str = ""
    kind: str = "policy"
    precision: str = "float32"
    sharding: str = "fsdp"
    micro_tokens: int = 50
    unit_rows: int = 256
    round_units: int = 4
    ask_after: int | None = None
    """Times that rank 1 may ask whether to stop until somebody has asked it to."""
    kill_after: int | None = None
    """Micro-batches of rank 1 until it is killed."""
    world: int = WORLD
    port: int = field(default_factory=free_port)
    number: int = field(default_factory=itertools.count().__next__)


def run(job, rank):
    """Go through a job; what this rank said of it, held and computed is in the job's folder."""
    root = Path(job.root)
    computed, held = [], []
    compute, load = inference._of_group, readers.load_spread
    read, rows = StoredTensor.__getitem__, []

    def counted(ctx, model, rows, quantity, group):
        if job.kill_after == len(computed) and rank:
            os.kill(os.getpid(), signal.SIGKILL)
        computed.append(list(group))
        return compute(ctx, model, rows, quantity, group)

    def looked_at(*how):
        model = load(*how)
        own = sum(p.to_local().numel() for p in model.parameters())
        types = sorted({str(p.dtype) for p in model.parameters()})
        held.append([own, sum(p.numel() for p in model.parameters()), types])
        return model

    def noted(tensor, some):
        rows.append([tensor.shape[0], len(range(tensor.shape[0])[some])])
        return read(tensor, some)

    inference._of_group, readers.load_spread, StoredTensor.__getitem__ = counted, looked_at, noted
    inference.UNIT_ROWS, inference.ROUND_UNITS = job.unit_rows, job.round_units
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.world), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port)}
    signs = root / f"signs-{job.number}"
    runner = Runner(root, **job.changes)
    ctx = runner.context(
        job.address or SCORE,
        rank=rank,
        world=job.world,
        heartbeats=signs if job.world > 1 else None,
        sharding=Sharding(job.sharding),
        micro_tokens=job.micro_tokens,
    )
    signs.mkdir(parents=True, exist_ok=True)
    if job.ask_after is not None and rank:
        ctx._stop = AskedAt(job.ask_after)
    said = "returned"
    try:
        if job.address:
            metrics = runner.run(job.address, ctx)
            (root / "metrics.json").write_text(json.dumps(metrics))
        else:
            (root / "answers.json").write_text(json.dumps(answers(job, ctx)))
    except (ShareDone, Stopped, StageError, RankLost) as error:
        said = f"{type(error).__name__}: {error}"
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    finally:
        inference._of_group, readers.load_spread = compute, load
        StoredTensor.__getitem__ = read
    report = {"said": said, "computed": computed, "held": held, "rows": rows}
    (root / f"rank-{rank}.json").write_text(json.dumps(report))


def answers(job, ctx):
    with join(ctx):
        load = lambda: getattr(fresh(ctx), job.kind)(  # noqa: E731
            Path(job.model), ctx.device, Precision(job.precision)
        )
        quantity = inference.logprobs_by("reference", load, 1.0)
        return inference.over_responses(ctx, ROWS, quantity)


def main(jobs, rank, log):
    output = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    try:
        for job in jobs:
            run(job, rank)
    except BaseException:
        traceback.print_exc()
        raise


def go_through(root, jobs, ends=(0, 0)):
    """The ranks' ends are these."""
    logs = [root / f"log-{jobs[0].number}-{rank}" for rank in range(WORLD)]
    ranks = [
        FORKS.Process(
            target=runpy.run_path, args=(__file__, {"ARGS": (jobs, rank, str(log))}, RANK)
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(2 * TIMEOUT_S)  # for many jobs, one after the other
        ended = [process.exitcode for process in ranks]
        assert ended == list(ends), [log.read_text()[-4000:] for log in logs]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def alone(job):
    """The same in this process."""
    run(Job(**{**vars(job), "world": 1, "root": f"{job.root}-alone"}), 0)


@pytest.fixture(scope="module")
def copies(trained, tmp_path_factory):
    """Copies of the trained run, for a job and for what one process makes of it."""
    root = tmp_path_factory.mktemp("readers")

    def copy(name, address="", changes=None, **options):
        job = Job(str(root / name), address, changes or {}, **options)
        for folder in (job.root, f"{job.root}-alone"):
            shutil.copytree(trained.root, folder)
            if address:
                for path in Runner(Path(folder), **job.changes).paths(address)[1].values():
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return job

    copy.root = root
    return copy


def save_as_adapter(base, folder):
    from stages.contracts.lora import LoraParams
    from stages.engines.models.folders import save_model

    params = LoraParams(**LORA, save="adapter")
    model = open_for_training(load_policy, base, "cpu", params, 3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.fill_(0.05)
    save_model(model, folder, tokenizer_from=base, lora=params)
    return folder


def with_one_more(base, folder):
    shutil.copytree(base, folder)
    rewrite_weights(folder / "model.safetensors", lambda t: t.update(more=torch.ones(3)))
    return folder


@pytest.fixture(scope="module")
def jobs(copies, trained):
    base = trained.paths("sft")[0]["base"]
    models = {
        "tied": with_tied_head(base, copies.root / "tied_model"),
        "adapter": save_as_adapter(base, copies.root / "adapter_model"),
        "more": with_one_more(base, copies.root / "more_model"),
    }
    made = {
        "score": copies("score", SCORE),
        "bfloat16": copies("bfloat16", SCORE, BFLOAT16, sharding="zero3", unit_rows=4),
        "one_batch": copies("one_batch", SCORE, SOURCES, micro_tokens=8192),
        "reference": copies("reference", REFERENCE, PREFERENCE),
        "evaluate": copies("evaluate", EVALUATE, SEVERAL_UNITS),
        "evaluate_whole": copies("evaluate_whole", EVALUATE, SEVERAL_UNITS, sharding="zero2"),
        "taken": copies("taken", "reward_model", TAKEN),
        **{name: copies(name, model=str(models[name])) for name in models},
    }
    for root in (made["taken"].root, f"{made['taken'].root}-alone"):
        given = trained.root / "artifacts/rewards/reward_model"
        shutil.copytree(given, Path(root) / "models", dirs_exist_ok=True)
    go_through(copies.root, list(made.values()))
    for job in made.values():
        if job.model != str(models["more"]):
            alone(job)
    return made


def report(job, rank):
    return json.loads((Path(job.root) / f"rank-{rank}.json").read_text())


def left(job, root=None):
    """All that a stage has written, and its metrics."""
    root = Path(root or job.root)
    outs = Runner(root, **job.changes).paths(job.address)[1].values()
    metrics = json.loads((root / "metrics.json").read_text())
    return [Runner.contents(path) for path in outs], metrics


STAGES = ["score", "bfloat16", "one_batch", "reference", "evaluate", "taken"]


@pytest.mark.parametrize("name", [*STAGES, "evaluate_whole"])
def test_ranks_write_what_one_process_writes(jobs, name):
    job = jobs[name]
    assert [report(job, rank)["said"].split(":")[0] for rank in range(2)] == [
        "returned",
        "ShareDone",
    ]
    assert left(job) == left(job, f"{job.root}-alone")


@pytest.mark.parametrize("name", STAGES)
def test_no_rank_ever_holds_more_than_its_part_of_a_model(jobs, name):
    reports = [report(jobs[name], rank) for rank in range(2)]
    assert [len(each["held"]) for each in reports] == [1 if name == "taken" else 2] * 2
    for parts in zip(*(each["held"] for each in reports), strict=True):
        whole = parts[0][1]
        assert sum(own for own, _, _ in parts) == whole
        assert max(own for own, _, _ in parts) < 0.6 * whole
        assert {types[0] for _, _, types in parts} == {
            "torch.bfloat16" if name == "bfloat16" else "torch.float32"
        }
    assert all(read <= -(-rows // 2) for each in reports for rows, read in each["rows"])


def test_ranks_share_the_micro_batches_and_not_the_units(jobs):
    computed = [report(jobs["score"], rank)["computed"] for rank in range(2)]
    of_one = json.loads((Path(f"{jobs['score'].root}-alone") / "rank-0.json").read_text())
    num_batches = len(of_one["computed"]) // 2  # of each of the two models
    assert num_batches > 2
    assert [len(some) for some in computed] == [2 * -(-num_batches // 2)] * 2
    assert {str(g) for some in computed for g in some} == {str(g) for g in of_one["computed"]}


def test_ranks_with_whole_models_share_the_micro_batches_too(jobs):
    reports = [report(jobs["evaluate_whole"], rank) for rank in range(2)]
    of_one = json.loads((Path(f"{jobs['evaluate_whole'].root}-alone") / "rank-0.json").read_text())
    shares = [len(each["computed"]) for each in reports]
    assert [each["held"] for each in reports] == [[], []]
    assert max(shares) < len(of_one["computed"])


def test_a_rank_without_rows_makes_the_passes_all_the_same(jobs):
    computed = [report(jobs["one_batch"], rank)["computed"] for rank in range(2)]
    assert computed[0] == computed[1]
    assert len(computed[0]) == 2


@pytest.mark.parametrize("name", ["tied", "adapter"])
def test_a_spread_model_answers_as_a_whole_one(jobs, name):
    job = jobs[name]
    spread, whole = (
        json.loads((Path(folder) / "answers.json").read_text())
        for folder in (job.root, f"{job.root}-alone")
    )
    assert spread == whole


def test_a_tensor_that_nobody_reads_is_an_error(jobs):
    said = [report(jobs["more"], rank)["said"] for rank in range(2)]
    assert all(each.startswith("StageError") for each in said)
    assert all("has a tensor more that the model has no place for" in each for each in said)


@pytest.mark.parametrize("name", ["kill", "ask"])
def test_ranks_that_were_killed_or_stopped_go_on_to_the_same_bytes(copies, name):
    small = {"unit_rows": 4, "round_units": 1}
    ends = {"kill": {"kill_after": 4}, "ask": {"ask_after": 6}}
    job = copies(name, SCORE, **small, **ends[name])
    go_through(copies.root, [job], ends=(0, -signal.SIGKILL if name == "kill" else 0))
    said = report(job, 0)["said"]
    assert said.startswith("RankLost: rank 1" if name == "kill" else "Stopped"), said
    parts = (Path(job.root) / "jobs" / SCORE / "scratch/parts").glob("rewards*/*.json")
    kept = {int(path.name[:8]) // 4 for path in parts}
    assert kept
    again = Job(job.root, SCORE, **small)
    go_through(copies.root, [again])
    alone(job)
    assert left(job) == left(job, f"{job.root}-alone")
    of_rewards = len(report(again, 0)["computed"]) - num_turns(job, ROUNDS)
    assert of_rewards == num_turns(job, [set(some) - kept for some in ROUNDS])


ROUNDS = [{0, 1}, {2, 3}, {4}]
"""The units that two ranks take on at once."""


def num_turns(job, rounds):
    """Passes that each rank makes through a model, by what one process has computed."""
    computed = json.loads((Path(f"{job.root}-alone") / "rank-0.json").read_text())["computed"]
    units = [group[0] // 4 for group in computed[: len(computed) // 2]]
    return sum(-(-sum(unit in some for unit in units) // WORLD) for some in rounds)


@pytest.mark.parametrize("kind", ["policy", "scalar"])
def test_one_process_loads_models_whole(trained, kind):
    loaders = fresh(trained.context(SCORE, sharding=Sharding.FSDP))
    assert getattr(loaders, kind) in (load_policy, load_scalar_model)


if __name__ == RANK:
    main(*globals()["ARGS"])
