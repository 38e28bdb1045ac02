"""Ranks that train together: real processes over loopback, equal to one rank, and what ends them.

This file, run under the name RANK, is one such rank.
"""

import hashlib
import json
import os
import resource
import runpy
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from stages.algorithms.loss import Counts, Loss, MetricPart, Per
from stages.checkpoint import load_checkpoint
from stages.context import Context, LocalScratch, ShareDone, StageError, Stopped
from stages.contracts.lora import ALL_WEIGHTS
from stages.engines.models import tensor_files
from stages.engines.models.folders import load_policy
from stages.engines.processes.meeting import backend_of_gpus
from stages.engines.processes.ranks import join
from stages.engines.training.learner import Optimization
from stages.engines.training.loop import Plan, Work, train
from stages.engines.training.optimizer import Learner
from stages.engines.training.resume import resume, save_if_possible
from stages.engines.training.rl_state import save_state
from stages.engines.training.saving import sampling_hash, save_learner
from stages.engines.training.schedules import warmup_then_cosine
from tests.ports import free_port
from tests.stages.conftest import Interrupted, Runner, everything
from tests.stages.forks import FORKS
from tests.waiting import FOR_EVER_S, TIMEOUT_S, until

NUM_ROWS = 23
HOST = socket.gethostname()
RANK = "one_rank"


class Uneven(torch.nn.Module):
    """Has one weight that few rows use and one that none does."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.last, self.rare, self.unused = (
            torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64, generator=generator))
            for shape in ((4, 8), (8, 1), (4, 1), (3, 3))
        )

    def forward(self, x, row):
        y = torch.tanh(x @ self.first) @ self.last
        return y + x @ self.rare if row % 11 == 0 else y


def tokens(row):
    """Between one and five vectors."""
    generator = torch.Generator().manual_seed(row)
    return torch.randn(1 + row % 5, 4, dtype=torch.float64, generator=generator)


def fit(
    ctx,
    *,
    batch_size=8,
    epochs=2,
    step_seconds=0.0,
    fail_at=None,
    nan_at=None,
    bad_row=None,
    hang_at=None,
    early=False,
    bare=False,
    late=False,
):
    """The mean over all tokens of a step, as in SFT; this rank's weights and moments, history."""
    plan = Plan(NUM_ROWS, batch_size, epochs, seed=5, learning_rate=warmup_then_cosine(0.1))
    model = Uneven()
    learner = Learner(model, Optimization(learning_rate=0.05, max_grad_norm=0.5, weight_decay=0.1))
    calls = 0

    def counts(rows):
        return Counts(sum(len(tokens(row)) for row in rows), len(rows))

    def survey(rows):
        return {"rows": float(sum(rows))}

    def micro_loss(rows, step):
        nonlocal calls
        calls += 1
        time.sleep(step_seconds)
        if calls == hang_at:
            time.sleep(1000)
        errors = [(model(tokens(r), r).squeeze(-1) - tokens(r).sum(1)).square() for r in rows]
        loss = torch.cat(errors).sum() / step.counts.tokens
        if calls == fail_at:
            raise StageError("row 7 is bad")
        if calls == nan_at or bad_row in rows:
            loss = loss * float("nan")
        metrics = {
            "error": MetricPart(torch.cat(errors).sum(), Per.TOKEN),
            "error_max": MetricPart(torch.cat(errors).max(), Per.MAX),
            "error_min": MetricPart(torch.cat(errors).min(), Per.MIN),
            "surveyed": MetricPart(torch.tensor(step.sums["rows"]), Per.MAX),
        }
        return Loss(loss, metrics)

    with join(ctx) as ranks:
        if early:
            raise Stopped("in between")
        if late:
            time.sleep(0.0 if ctx.rank else 0.2)
            came = time.monotonic()
            ranks.agree("a place where nothing is asked")
            assert time.monotonic() > max(ranks.gather(came)), "each waits for the last one"
        while bare:
            dist.all_reduce(torch.zeros(1))
            (ctx.folder / "begun").touch()
        work = Work(counts, micro_loss, survey)
        history = train(ctx, {"model": learner}, plan, work, shown=["loss"], ranks=ranks)
        own = everything(learner)
        save_file(own, ctx.folder / f"weights-{ctx.rank}.safetensors")
    return history


def context(folder, **options):
    folder.mkdir(parents=True, exist_ok=True)
    return Interrupted(stage="test", key=None, seed=3, folder=folder, **options)


def rank_fit(folder, rank, world, options):
    mine = options.get("only", {}).get(str(rank), {})
    if skew := mine.pop("clock_off_by", 0):
        real = time.time
        time.time = lambda: real() + skew
    ctx = context(
        folder,
        rank=rank,
        world=world,
        collective_seconds=options.get("patience", 60),
        checkpoint_seconds=options.get("checkpoint_seconds", 1000),
        micro_tokens=2,
        heartbeats=Path(options["signs"]),
    )
    ctx.stop_after = mine.pop("stop_after", ctx.stop_after)
    if local := options.get("local"):
        ctx.local = LocalScratch(Path(local), lambda _: None, options["num_nodes"])
    if mine.pop("sees_no_scratch", False):
        ctx.folder = folder / "elsewhere"
    fit(ctx, **options.get("fit", {}), **mine)


def rank_stage(folder, rank, world, options):
    runner, address = Runner(folder), options["address"]
    ctx = runner.context(address, rank=rank, world=world, heartbeats=Path(options["signs"]))
    metrics = runner.run(address, ctx)
    (folder / f"metrics-{rank}.json").write_text(json.dumps(metrics))


def rank_save(folder, rank, world, options):
    """A model and its moments after a step, in many files; what is in them is the same for all."""
    tensor_files.FILE_BYTES = 4_000
    base = Path(options["base"])
    model = load_policy(base)
    learner = Learner(model, Optimization(learning_rate=0.05, max_grad_norm=0.5))
    for parameter in learner.parameters():
        parameter.grad = torch.ones_like(parameter)
    learner.step(1.0)
    learners = {"policy": learner}
    ctx = context(folder, rank=rank, world=world, heartbeats=Path(options["signs"]))
    if options.get("full") == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))
    own = ctx.folder / f"out-{rank}"
    with join(ctx) as ranks:
        hashes = save_learner(learner, own, tokenizer_from=base, ranks=ranks)
        state = {"kl_coef": None, "lora": ALL_WEIGHTS, "tokenizer_from": base, "ranks": ranks}
        hashes |= save_state(own / "state", 1, learners, **state)
        assert len(hashes) > 16
        for path, digest in hashes.items():
            assert hashlib.md5(path.read_bytes()).hexdigest() == digest, path
        assert save_if_possible(ctx.scratch, learners, [{"loss": 1.0}], ranks=ranks)
        assert resume(ctx.scratch, learners, ranks)[0] == [{"loss": 1.0}]
        hashed = sampling_hash(learner, ranks)
    (own / "hash").write_text(hashed)


def main(options):
    """One rank, in a process of its own."""
    log = os.open(Path(options["signs"]) / f"log-{options['rank']}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(options["rank"]),
        "WORLD_SIZE": str(options["world"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(options["port"]),
    }
    run = {"fit": rank_fit, "stage": rank_stage, "save": rank_save}[options["mode"]]
    try:
        run(Path(options["folder"]), options["rank"], options["world"], options)
    except (ShareDone, Stopped, StageError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1 if isinstance(error, StageError) else 0)
    print("returned", flush=True)


class Processes:
    """The ranks of one start of a job."""

    def __init__(self, mode, folder, world, *, without=(), **options):
        folder.mkdir(parents=True, exist_ok=True)
        self.signs = folder / f"signs-{len(list(folder.glob('signs-*')))}"
        self.signs.mkdir()
        options |= {"folder": str(folder), "signs": str(self.signs), "mode": mode}
        options |= {"world": world, "port": free_port()}
        self.ranks = {
            rank: FORKS.Process(
                target=runpy.run_path,
                args=(__file__, {"OPTIONS": {**options, "rank": rank}}, RANK),
            )
            for rank in range(world)
            if rank not in without
        }
        for process in self.ranks.values():
            process.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.ranks.values():
            process.kill()
            process.join()

    def ends(self, *ranks):
        """By rank: the exit status, and all that it printed."""
        for rank in ranks or self.ranks:
            self.ranks[rank].join(TIMEOUT_S)
            assert self.ranks[rank].exitcode is not None, f"rank {rank} hangs"
        return {
            rank: (self.ranks[rank].exitcode, (self.signs / f"log-{rank}").read_text())
            for rank in ranks or self.ranks
        }

    def wait_for_steps(self, folder, count):
        self.until(lambda: len(logged(folder)) >= count, "steps are taken")

    def until(self, condition, what):
        def said():
            logs = sorted(self.signs.glob("log-*"))
            return "".join(f"\n{path.name}: {path.read_text()[-4000:]}" for path in logs)

        at_work = lambda: all(process.is_alive() for process in self.ranks.values())  # noqa: E731
        until(condition, what, said, at_work=at_work)

    def failures(self):
        return [json.loads(path.read_text()) for path in self.signs.glob("failure-*.json")]


def assert_failed(ends, *words):
    """Each of these ranks failed, and said all that."""
    for status, said in ends.values():
        assert status == 1
        assert not [word for word in words if word not in said], said


def run_all(mode, folder, world, **options):
    """Start all ranks and see them end well; what each printed last."""
    with Processes(mode, folder, world, **options) as processes:
        ends = processes.ends()
    assert all(status == 0 for status, _ in ends.values()), ends
    return {rank: said.strip().splitlines()[-1] for rank, (_, said) in ends.items()}


def weights(folder, rank=0):
    return (folder / f"weights-{rank}.safetensors").read_bytes()


def logged(folder):
    """What was logged of each step, without how fast it was."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:
        assert row["metrics"].pop("tokens_per_second") > 0
    return rows


@pytest.mark.parametrize(("world", "batch_size"), [(2, 8), (3, 2)])
def test_ranks_learn_what_one_rank_learns(tmp_path, world, batch_size):
    """Three ranks for two rows, and for one at the end of an epoch, among the cases."""
    options = {"batch_size": batch_size, "epochs": 2}
    fit(context(tmp_path / "one", micro_tokens=64), **options)
    said = run_all("fit", tmp_path / "many", world, fit={**options, "late": True})
    assert said[0] == "returned"
    assert {rank: word.split(":")[0] for rank, word in said.items() if rank} == dict.fromkeys(
        range(1, world), "ShareDone"
    )

    one, many = (load_file(tmp_path / f"{name}/weights-0.safetensors") for name in ("one", "many"))
    assert one.keys() == many.keys()  # moments of the unused weight in neither
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-9, atol=1e-12)
    histories = [[row["metrics"] for row in logged(tmp_path / name)] for name in ("one", "many")]
    assert len(histories[0]) == len(histories[1])
    for alone, together in zip(*histories, strict=True):
        assert together == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(("gpus", "backend"), [("abc", "nccl"), ("aba", "gloo"), ("aa", "gloo")])
def test_ranks_on_one_gpu_meet_through_the_host(gpus, backend):
    store = dist.HashStore()
    with ThreadPoolExecutor() as ranks:
        ask = [
            ranks.submit(backend_of_gpus, store, rank, len(gpus), gpu)
            for rank, gpu in enumerate(gpus)
        ]
    assert {each.result() for each in ask} == {backend}


def test_ranks_hold_the_same_bits_and_so_does_a_second_run(tmp_path):
    for name in ("a", "b"):
        run_all("fit", tmp_path / name, 3)
    assert len({weights(tmp_path / name, r) for name in ("a", "b") for r in range(3)}) == 1
    steps = [[row["metrics"] for row in logged(tmp_path / name)] for name in ("a", "b")]
    assert steps[0] == steps[1]


def test_a_stop_asked_of_one_rank_stops_all_and_resumes_to_the_same_bytes(tmp_path):
    run_all("fit", tmp_path / "undisturbed", 2)
    said = run_all("fit", tmp_path / "stopped", 2, only={"1": {"stop_after": 3}})
    assert set(said.values()) == {"Stopped: stopped after step 3 of 6"}
    checkpoints = [path.name for path in (tmp_path / "stopped/scratch").iterdir()]
    assert checkpoints == ["checkpoint-00000003"]

    run_all("fit", tmp_path / "stopped", 2)
    assert weights(tmp_path / "undisturbed") == weights(tmp_path / "stopped")
    steps = [
        [row["metrics"] for row in logged(tmp_path / name)] for name in ("undisturbed", "stopped")
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(("world", "alone"), [(1, True), (2, False)])
def test_a_rank_stops_by_itself_only_where_there_is_no_other(tmp_path, world, alone):
    ctx = Context(stage="test", key=None, seed=3, folder=tmp_path, world=world)
    assert not ctx.should_stop_alone()
    ctx.request_stop()
    assert ctx.should_stop_alone() is alone


def test_a_rank_that_stops_before_the_loop_takes_the_others_with_it(tmp_path):
    said = run_all("fit", tmp_path, 2, only={"1": {"early": True}})
    assert said == {0: "Stopped: stopped before the first step", 1: "Stopped: in between"}


def test_killed_ranks_go_on_from_the_last_checkpoint(tmp_path):
    run_all("fit", tmp_path / "undisturbed", 2)
    slow = {"step_seconds": 0.1}
    with Processes("fit", tmp_path / "killed", 2, fit=slow, checkpoint_seconds=0) as processes:
        processes.wait_for_steps(tmp_path / "killed", 3)
        for process in processes.ranks.values():
            process.kill()
    run_all("fit", tmp_path / "killed", 2)
    assert weights(tmp_path / "undisturbed") == weights(tmp_path / "killed")


def test_ranks_save_by_way_of_their_nodes_disk(tmp_path):
    """Killed on one node; told to stop on two, which have one disk here and read the shared one."""
    run_all("fit", tmp_path / "undisturbed", 2)
    options = {"local": str(tmp_path / "disk"), "checkpoint_seconds": 0}
    (tmp_path / "disk").mkdir()
    job = tmp_path / "killed"
    hangs = {"fit": {"hang_at": 14}, "num_nodes": 1, **options}
    with Processes("fit", job, 2, **hangs) as processes:
        processes.until(lambda: list(job.glob("scratch/checkpoint-*")), "a checkpoint")
        for process in processes.ranks.values():
            process.kill()
    run_all("fit", job, 2, num_nodes=1, **options)
    assert weights(tmp_path / "undisturbed") == weights(job)

    job = tmp_path / "stopped"
    said = run_all("fit", job, 2, num_nodes=2, only={"1": {"stop_after": 4}}, **options)
    assert said[0] == "Stopped: stopped after step 4 of 6"
    assert load_checkpoint(job / "scratch").step == 4, "the last step is there"
    run_all("fit", job, 2, num_nodes=2, **options)
    assert weights(tmp_path / "undisturbed") == weights(job)


def test_ranks_resume_from_what_rank_0_finds_even_if_they_see_no_checkpoint(tmp_path):
    run_all("fit", tmp_path / "undisturbed", 2)
    apart = {"sees_no_scratch": True}
    run_all("fit", tmp_path / "stopped", 2, only={"0": {"stop_after": 3}, "1": apart})
    run_all("fit", tmp_path / "stopped", 2, only={"1": apart})
    assert weights(tmp_path / "undisturbed") == weights(tmp_path / "stopped")
    left_by_1 = [path.name for path in (tmp_path / "stopped/elsewhere").rglob("*")]
    assert sorted(left_by_1) == ["scratch", "weights-1.safetensors"]


def test_artifacts_have_the_same_bytes_whoever_writes_them(tmp_path, trained):
    base = str(trained.paths("sft")[0]["base"])
    for world in (1, 2, 4):
        run_all("save", tmp_path / str(world), world, base=base)
        assert not list((tmp_path / str(world)).glob("out-[1-9]"))
    one = file_hashes(tmp_path / "1")
    assert sum(name.startswith("out-0/model-0") for name in one) > 8
    assert sum(name.startswith("out-0/state/optimizer-0") for name in one) > 8
    assert sum("scratch/checkpoint-00000001/tensors-0" in name for name in one) > 8
    assert file_hashes(tmp_path / "2") == one
    assert file_hashes(tmp_path / "4") == one


def file_hashes(folder):
    """All that ranks left there, but what each says of itself."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and not path.parent.name.startswith("signs")
    }


def test_a_rank_that_cannot_write_ends_all_with_its_error(tmp_path, trained):
    base = str(trained.paths("sft")[0]["base"])
    with Processes("save", tmp_path, 2, base=base, full=1) as processes:
        ends = processes.ends()
    assert all(status == 1 and "File too large" in said for status, said in ends.values()), ends


def test_a_killed_rank_is_named_without_waiting_whatever_the_clocks_say(tmp_path):
    """By the rank whose connection broke, and by one that still waits and reads of it."""
    slow = {"step_seconds": 0.1, "epochs": 1000}
    only = {"1": {"clock_off_by": -3600}, "2": {"clock_off_by": 1800}}
    with Processes("fit", tmp_path, 3, fit=slow, only=only, patience=FOR_EVER_S) as processes:
        processes.wait_for_steps(tmp_path, 2)
        processes.ranks[2].kill()
        ends = processes.ends(0, 1)
    assert_failed(ends, f": rank 2 on {HOST} was lost at step")
    assert not any("rank 0" in said or "rank 1" in said for _, said in ends.values())
    assert {failure["rank"] for failure in processes.failures()} == {0, 1}
    assert all("rank 2" in failure["error"] for failure in processes.failures())


def test_a_killed_rank_is_named_where_a_library_has_collectives_of_its_own(tmp_path):
    with Processes("fit", tmp_path, 2, fit={"bare": True}) as processes:
        processes.until((tmp_path / "begun").exists, "the ranks exchange something")
        processes.ranks[1].kill()
        assert_failed(processes.ends(0), f": rank 1 on {HOST} was lost at the start")


def test_a_stopped_rank_is_named_when_patience_ends_and_nobody_hangs(tmp_path):
    slow = {"step_seconds": 0.1, "epochs": 1000}
    with Processes("fit", tmp_path, 3, fit=slow, patience=10) as processes:
        processes.wait_for_steps(tmp_path, 2)
        os.kill(processes.ranks[1].pid, signal.SIGSTOP)
        ends = processes.ends(0, 2)
    assert_failed(ends, f"rank 1 on {HOST} has not come to step", "where 2 ranks have waited for")
    assert all("rank 1" in failure["error"] for failure in processes.failures())


def test_a_job_that_is_suspended_for_longer_than_patience_goes_on(tmp_path):
    """Its ranks stop and go on one after the other, as on two nodes."""
    slow = {"step_seconds": 0.1, "epochs": 3}
    with Processes("fit", tmp_path, 2, fit=slow, patience=10) as processes:
        processes.wait_for_steps(tmp_path, 2)
        for rank, number, seconds in (
            (1, signal.SIGSTOP, 0.6),
            (0, signal.SIGSTOP, 15.0),
            (0, signal.SIGCONT, 2.5),
            (1, signal.SIGCONT, 0.0),
        ):
            os.kill(processes.ranks[rank].pid, number)
            time.sleep(seconds)
        assert {status for status, _ in processes.ends().values()} == {0}


def test_a_rank_that_lives_but_hangs_is_named(tmp_path):
    with Processes("fit", tmp_path, 3, patience=10, only={"2": {"hang_at": 3}}) as processes:
        ends = processes.ends(0, 1)
    assert_failed(ends, f"rank 2 on {HOST} has not come to step", "where 2 ranks have waited for")


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_starts_is_named(tmp_path, absent):
    with Processes("fit", tmp_path, 3, patience=10, without=[absent]) as processes:
        ends = processes.ends()
    waited = f"rank {absent} has not come to the start, where 2 ranks have waited"
    assert_failed(ends, waited, "it has sent no heartbeat")


def test_the_error_of_one_rank_is_that_of_all(tmp_path):
    with Processes("fit", tmp_path, 2, only={"1": {"fail_at": 3}}) as processes:
        ends = processes.ends()
    assert {status for status, _ in ends.values()} == {1}
    assert "StageError: row 7 is bad" in ends[1][1]
    assert ": rank 1 failed at step" in ends[0][1]
    assert "row 7 is bad" in ends[0][1]


def test_a_number_that_is_not_finite_on_one_rank_stops_all_with_its_step(tmp_path):
    with Processes("fit", tmp_path, 2, only={"1": {"nan_at": 3}}) as processes:
        assert_failed(processes.ends(), "StageError: test: loss is nan at step 2 of 6")


def test_the_row_at_fault_is_named_by_every_rank_whoever_has_it(tmp_path):
    plan = Plan(NUM_ROWS, 8, 2, seed=5, learning_rate=warmup_then_cosine(0.1))
    bad_row = plan.rows(1)[3]  # of the second rank's share of the second step
    with Processes("fit", tmp_path, 2, fit={"bad_row": bad_row}) as processes:
        ends = processes.ends()
    at_fault = f"look at row {bad_row} (its loss alone is nan)"
    assert_failed(ends, f"loss is nan at step 2 of 6; {at_fault}")


@pytest.mark.parametrize("address", ["sft", "reward_model", "policy_update@iter_001"])
def test_a_stage_on_two_ranks_writes_what_one_rank_writes(copied, tmp_path, address):
    runners = {}
    for name in ("one", "two"):
        runners[name] = copied(name)
        for path in (tmp_path / name / "jobs", *runners[name].paths(address)[1].values()):
            shutil.rmtree(path, ignore_errors=True)
    alone = runners["one"].run(address)
    said = run_all("stage", tmp_path / "two", 2, address=address)
    assert said == {0: "returned", 1: "ShareDone: rank 1 has trained; rank 0 writes"}

    together = json.loads((tmp_path / "two/metrics-0.json").read_text())
    assert together == pytest.approx(alone, rel=1e-3, abs=1e-5)
    model = f"{next(iter(runners['one'].paths(address)[1].values())).relative_to(tmp_path / 'one')}"
    files = [Path(tmp_path / name / model / "model.safetensors") for name in ("one", "two")]
    one, two = map(load_file, files)
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)
    steps = [row["step"] for row in logged(tmp_path / "two/jobs" / address)]
    assert steps == list(range(1, together["num_steps"] + 1))


if __name__ == RANK:
    main(OPTIONS)  # noqa: F821
