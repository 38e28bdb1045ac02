"""Fused steps on several ranks: the bytes of the staged loop on as many ranks, whatever ends them.

This file, run under the name RANK, is one such rank.
"""

import itertools
import json
import os
import runpy
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load

from stages import online
from stages.context import RankLost, ShareDone, Stopped
from stages.contracts.base import Processes as Kind
from stages.contracts.catalog import bind
from stages.contracts.sharding import Sharding
from stages.data.schema import ToolAnswerRow, columns_of
from stages.engines.generation.torch_generator import TorchGenerator
from tests.ports import free_port
from tests.stages.conftest import Runner
from tests.stages.forks import FORKS
from tests.stages.test_online import GRPO, OVERLAP, PPO, ROWS, AskedAt
from tests.waiting import FOR_EVER_S, TIMEOUT_S, until

RANK = "one_rank"
NAMES = ["fast_001", "fast_002"]
CHAINED = {name: {"policy": parent} for name, parent in zip(NAMES, ["sft", *NAMES], strict=False)}
STAGED = [f"{stage}@{name}" for name in NAMES for stage in ("rollout", "score", "policy_update")]
FUSED = ["online@fast"]
KEPT = ("rollouts", "tool_answers", "scores", "experience")
# A rollout has several units, so that each rank has some.
SMALL = {"rollout": {"batch_size": 4}}
KL = {"policy_update": {"kl_target": 0.1}}
LORA = {"lora": {"rank": 4, "alpha": 8, "save": "adapter"}}
DISTILL = {"algorithm": "distill", "reward": "verifier", "teacher": "artifacts/base"}
DPO = {"algorithm": "dpo", "reward": "verifier"}
BEST = {"algorithm": "best_of_n", "reward": "verifier"}
GAME = {"algorithm": "grpo", "reward": "game"}
TURNS = {"environment": "asks:Asks", "max_turns": 3, "max_observation_tokens": 8}
PLAYED = {
    "rewards": {"game": {"kind": "environment"}},
    "rollout": {**SMALL["rollout"], **TURNS, "max_new_tokens": 14, "temperature": 1.5},
}
ELIDED = {
    **PLAYED,
    "rollout": {**PLAYED["rollout"], "environment": "asks:Digits", "max_turns": 5},
    "episodes": {"context_tokens": 20, "turn_tokens": 4},
}
ASKS = '''
from stages.environments.environment import Environment, Observation


class Asks(Environment):
    """Asks again as often as the seed says, and pays for long answers."""

    def reset(self, row, seed):
        self.left = 1 + seed % 3

    def step(self, action):
        self.left -= 1
        return Observation("1+2=", reward=0.25 * len(action), done=not self.left)


class Digits(Asks):
    stops = tuple("02468")

    def reset(self, row, seed):
        self.left = 2 + seed % 4
'''
CASES = {
    "ppo": (PPO, KL, 2, "none"),
    "grpo-4": (GRPO, {}, 4, "none"),
    "dpo-lora": (DPO, LORA, 2, "none"),
    "best-of-n": (BEST, {}, 2, "none"),
    "game": (GAME, PLAYED, 2, "none"),
    "elided-fsdp": ({**GAME, "algorithm": "ppo"}, ELIDED, 2, "fsdp"),
    "elided-zero3": (PPO, {**KL, **ELIDED}, 2, "zero3"),
    "lora-bfloat16-fsdp": (GRPO, {**LORA, "precision": "bfloat16"}, 2, "fsdp"),
    "lora-zero3": (GRPO, LORA, 2, "zero3"),
    "grpo-zero1": (GRPO, {}, 2, "zero1"),
    "ppo-zero2": (PPO, KL, 2, "zero2"),
    "ppo-fsdp": (PPO, KL, 2, "fsdp"),
    "distill-fsdp": (DISTILL, {"policy_update": {"distill_top_k": 4}}, 2, "fsdp"),
    "bfloat16-fsdp": (GRPO, {"precision": "bfloat16"}, 2, "fsdp"),
}
"""rl, params, ranks, how the policy is spread."""
SAVED = "best-of-n"
"""Each of its steps begins with a checkpoint; no other's does."""


@pytest.fixture
def copied(copied):
    """Copies of the trained run that have the environments of this file."""

    def copy(name):
        return with_environments(copied(name))

    return copy


def with_environments(runner):
    (runner.root / "environments/asks.py").write_text(ASKS)
    return runner


def note_writing(ctx, root):
    """Note what was written in the last step: what this rank opened for it, and what is new then.

    The latter is also what other ranks wrote, and libraries that are not Python's.
    """
    opened, before, log = set(), set(), ctx.log

    def heard(event, arguments):
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            opened.add(str(arguments[0]))

    def there():
        walks = (os.walk(folder) for folder in (ctx.folder, os.environ["TMPDIR"]))
        return {f"{at}/{name}" for walk in walks for at, _, files in walk for name in files}

    def log_and_note(step, metrics):
        log(step, metrics)
        if step == len(NAMES):
            written = sorted(opened | (there() - before))
            (root / f"signs/written-{ctx.rank}.json").write_text(json.dumps(written))
        opened.clear()
        before.update(there())

    sys.addaudithook(heard)
    ctx.log = log_and_note


def run(root, rank, world, options):
    runner = Runner(root, **options["params"])
    for number, address in enumerate(options["addresses"]):
        done = root / "signs" / f"done-{address}"
        together = bind(address, runner.params).stage.processes is Kind.TOGETHER
        if not together and not options.get("joined"):
            if not rank:
                runner.run(address)
                done.touch()
            at_work = lambda: not failed(root, options).exists()  # noqa: E731
            until(done.exists, f"rank 0 is done with {address}", at_work=at_work)
            continue
        os.environ["MASTER_PORT"] = str(options["ports"][number])
        ctx = runner.context(
            address,
            rank=rank,
            world=world,
            samplers=options.get("samplers", 0),
            tensor_parallel=options.get("tensor_parallel", 1),
            device=options.get("device", "cpu"),
            heartbeats=root / "signs" / f"{options['start']}-{number}",
            sharding=Sharding(options["sharding"]),
            checkpoint_seconds=options.get("checkpoint_seconds", 30.0),
            collective_seconds=options.get("collective_seconds", 600.0),
        )
        if options.get("fails") == rank:
            fail(options["fails_where"])
        if options.get("asked", {}).get(str(rank)) is not None:
            ctx._stop = AskedAt(options["asked"][str(rank)])
        if [address] == FUSED:
            note_writing(ctx, root)
        try:
            metrics = runner.run(address, ctx)
            (root / f"{address}.json").write_text(json.dumps(metrics))
        except ShareDone:
            pass


def main(options):
    root, rank = Path(options["root"]), options["rank"]
    log = os.open(root / "signs" / f"log-{options['start']}-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(options["world"]), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    os.environ["TMPDIR"] = str(root / "temporary")
    try:
        run(root, rank, options["world"], options)
    except Stopped:
        sys.exit(3)
    except RankLost as error:
        print(error, flush=True)
        sys.exit(4)
    except BaseException:
        failed(root, options).touch()
        raise


def failed(root, options):
    """There once a rank has failed, for those that wait for it where no job would have ranks."""
    return root / "signs" / f"failed-{options['start']}"


def fail(where):
    """This rank fails while it samples, or, while its thread samples for very long, learns."""

    def raise_it(*_, **__):
        raise ValueError("a made-up trouble")

    if where == "sampling":
        TorchGenerator.generate = raise_it
        return
    generate, learns = TorchGenerator.generate, threading.main_thread()
    TorchGenerator.generate = lambda *asked, **how: (
        generate(*asked, **how) if threading.current_thread() is learns else time.sleep(FOR_EVER_S)
    )
    online.learn = raise_it


STARTS = itertools.count()


def options_of_ranks(runner, addresses, rl, changes, world, sharding, **options):
    """For `main`, of the ranks that learn, and those that only sample."""
    num_ranks = world + options.get("samplers", 0)
    params = {
        "rl": {"iterations": CHAINED, "online": {"fast": {"policy": "sft", "steps": 2}}, **rl}
    }
    options |= {"root": str(runner.root), "addresses": addresses, "world": world}
    options |= {"params": {**SMALL, **changes, **params}, "sharding": sharding}
    options |= {"ports": [free_port() for _ in addresses], "start": next(STARTS)}
    for name in ("signs", "temporary"):
        (runner.root / name).mkdir(exist_ok=True)
    return [{**options, "rank": rank} for rank in range(num_ranks)]


def start(*job, **options):
    """The ranks of a job, which go through these stages."""
    ranks = [
        FORKS.Process(target=runpy.run_path, args=(__file__, {"OPTIONS": of_rank}, RANK))
        for of_rank in options_of_ranks(*job, **options)
    ]
    for process in ranks:
        process.start()
    return ranks


def finish(runner, ranks, expected=0):
    try:
        for process in ranks:
            process.join(TIMEOUT_S)
        ends = [process.exitcode for process in ranks]
        logs = sorted((runner.root / "signs").glob("log-*"))
        said = "".join(f"\n{path.name}: {path.read_text()[-3000:]}" for path in logs)
        assert ends == [expected] * len(ranks), f"{ends}{said}"
    finally:
        for process in ranks:
            process.kill()
            process.join()


def go_through(runner, *job, **options):
    finish(runner, start(runner, *job, **options))


def left(runner, policy):
    root = runner.root / "artifacts/policies" / policy
    return {part: runner.contents(root / part) for part in ("model", "state")}


def all_left(runner):
    return left(runner, "fast"), {path: runner.rows(path.format("fast")) for path in ROWS}


def unexpected(runner, rank):
    """What a rank wrote in the last step beside its rows and what is said of it."""
    job = runner.root / "jobs/online@fast"
    expected = [*(f"{job}/scratch/rows/{kind}/00000" for kind in KEPT), f"{runner.root}/signs/"]
    expected += [f"{job}/{name}" for name in ("metrics.jsonl", "progress.json", "tables/")]
    written = json.loads((runner.root / f"signs/written-{rank}.json").read_text())
    return [path for path in written if not path.startswith((*expected, "/dev/null"))]


@pytest.mark.parametrize("case", CASES)
def test_fused_steps_end_with_the_bytes_of_iterations_on_as_many_ranks(copied, case):
    if "zero" in CASES[case][3]:
        pytest.importorskip("deepspeed")
    runner = copied("run")
    given = []
    if "environment" in CASES[case][1].get("rollout", {}):
        given = ["reward_source@game"]
    seconds = 0.0 if case == SAVED else 1e9
    go_through(runner, [*given, *STAGED, *FUSED], *CASES[case], checkpoint_seconds=seconds)
    assert left(runner, "fast") == left(runner, NAMES[-1])
    for path in ROWS:
        together = runner.rows(path.format("fast"))
        for step, name in enumerate(NAMES, 1):
            own = [row for row in together if row["step"] == step]
            assert own == [{"step": step, **row} for row in runner.rows(path.format(name))]
    for rank in range(CASES[case][2]):
        places = {os.path.relpath(path, runner.root) for path in unexpected(runner, rank)}
        if case == SAVED:
            assert any("scratch/checkpoint-00000001/" in place for place in places)
        else:
            assert not places, "a step of which nothing is saved writes nothing but its rows"
    if case == "game":
        turns = {0 in row["loss_mask"] for row in runner.rows("rollouts/fast")}
        assert turns == {True, False}, "some episodes have several turns"
    if "elided" in case:
        segments = {len(row["segment_starts"]) for row in runner.rows("rollouts/fast")}
        assert len(segments) > 1, "some episodes have several segments"
    staged = json.loads((runner.root / f"policy_update@{NAMES[-1]}.json").read_text())
    fused = json.loads((runner.root / "online@fast.json").read_text())
    assert fused["num_steps"] == 2 * staged.pop("num_steps")
    assert {name: fused[name] for name in staged} == staged


@pytest.fixture(scope="module")
def undisturbed(trained, tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = Runner(tmp_path_factory.mktemp("undisturbed") / "run")
            shutil.copytree(trained.root, made[name].root, dirs_exist_ok=True)
            with_environments(made[name])
            go_through(made[name], FUSED, *DISTURBED[name])
        return all_left(made[name])

    return get


DISTURBED = {
    # Long episodes, of which old observations are elided.
    "serial": (PPO, {**KL, **ELIDED}, 2, "none"),
    "overlap": (GRPO, OVERLAP, 2, "none"),
}


@pytest.mark.parametrize(("name", "after"), [("overlap", 0), ("serial", 1)])
def test_killed_at_any_moment_they_end_with_the_same_bytes(copied, undisturbed, name, after):
    """One rank is killed after so many steps; the other names it, and the next start goes on."""
    runner = copied("killed")
    ranks = start(runner, FUSED, *DISTURBED[name], checkpoint_seconds=0.0)
    job = runner.root / "jobs/online@fast"
    moment = "scratch/steps/*/scratch/parts/*/*" if not after else "metrics.jsonl"
    there = lambda: any(path.stat().st_size for path in job.glob(moment))  # noqa: E731
    until(there, "they are at work", at_work=lambda: all(one.is_alive() for one in ranks))
    os.kill(ranks[1].pid, signal.SIGKILL)
    ranks[0].join(TIMEOUT_S)
    finish(runner, ranks[:1], expected=4)
    log = next((runner.root / "signs").glob("log-*-0")).read_text()
    assert "rank 1" in log
    go_through(runner, FUSED, *DISTURBED[name], checkpoint_seconds=0.0)
    assert all_left(runner) == undisturbed(name)


@pytest.mark.parametrize("world", [1, 4])
def test_what_two_ranks_began_another_number_of_them_ends(copied, undisturbed, world):
    """The first step is that of two ranks, with their bytes; the second differs by rounding."""
    rl, changes, two, spread = DISTURBED["serial"]
    runner = copied("moved")
    ranks = start(runner, FUSED, rl, changes, two, spread, checkpoint_seconds=0.0)
    saved = runner.root / "jobs/online@fast/scratch/checkpoint-00000001"
    until(saved.exists, "the first step", at_work=lambda: all(one.is_alive() for one in ranks))
    os.kill(ranks[1].pid, signal.SIGKILL)
    ranks[0].join(TIMEOUT_S)
    finish(runner, ranks[:1], expected=4)
    go_through(runner, FUSED, rl, changes, world, spread, checkpoint_seconds=0.0)
    (moved, moved_rows), (stayed, stayed_rows) = all_left(runner), undisturbed("serial")
    for path, rows in stayed_rows.items():
        first = [row for row in moved_rows[path] if row["step"] == 1]
        assert first == [row for row in rows if row["step"] == 1], path
        # An answer is asked for where the policy has not had its last word.
        assert len(moved_rows[path]) == len(rows) or "tool_answers" in path, path
    one, other = (load(left["model"]["model.safetensors"]) for left in (moved, stayed))
    for name, weight in other.items():
        torch.testing.assert_close(one[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "where"), [("serial", "sampling"), ("overlap", "learning")])
def test_a_rank_that_fails_ends_the_others_with_its_own_words(copied, name, where):
    """Also one whose thread goes on sampling, for which its process would wait."""
    runner = copied("failing")
    how = {"fails": 1, "fails_where": where, "collective_seconds": 60.0}
    ranks = start(runner, FUSED, *DISTURBED[name], **how)
    try:
        ranks[0].join(TIMEOUT_S)
        assert ranks[0].exitcode in (4, 1)
        log = next((runner.root / "signs").glob("log-*-0")).read_text()
        assert "rank 1 failed at" in log
        assert "a made-up trouble" in log
    finally:
        for process in ranks:
            process.kill()
            process.join()


def stop_again_and_again(runner, name, rank, samplers=0):
    """Ask one rank to stop, each time later in its work, until all come to the end."""
    for number in range(20):
        asked = {str(rank): 2 + 5 * number}
        ranks = start(runner, FUSED, *DISTURBED[name], asked=asked, samplers=samplers)
        for process in ranks:
            process.join(TIMEOUT_S)
        if ranks[0].exitcode == 0:
            break
        finish(runner, ranks, expected=3)
    assert number > 1


@pytest.mark.parametrize("name", DISTURBED)
def test_where_one_rank_is_asked_to_stop_all_do_and_go_on_later(copied, undisturbed, name):
    runner = copied("stopped")
    stop_again_and_again(runner, name, rank=1)
    assert all_left(runner) == undisturbed(name)


@pytest.mark.parametrize("name", DISTURBED)
def test_samplers_of_their_own_give_the_bytes_of_those_that_learn_alone(copied, undisturbed, name):
    runner = copied("apart")
    go_through(runner, FUSED, *DISTURBED[name], samplers=1)
    assert all_left(runner) == undisturbed(name)


def test_samplers_of_their_own_replay_what_environments_answered_those_that_learn(
    copied, undisturbed
):
    """The environment would fail, but nobody asks it; and what they replay they record."""
    expected = undisturbed("serial")
    rl, changes, *spread = DISTURBED["serial"]
    replayed = copied("replayed")
    answers = expected[1]["tool_answers/{}"]
    assert any(row["turn"] > 1 for row in answers)
    assert any(row["segment_starts"] for row in expected[1]["rollouts/{}"])
    columns = columns_of(ToolAnswerRow)
    rows = [{name: row[name] for name in columns.names} for row in answers]
    pq.write_table(
        pa.Table.from_pylist(rows, columns), replayed.root / "tool_answers/record.parquet"
    )
    (replayed.root / "environments/asks.py").write_text(ASKS.replace("self.left -= 1", "1 / 0"))
    changes = {**changes, "rollout": {**changes["rollout"], "tools": "replay"}}
    go_through(replayed, FUSED, rl, changes, *spread, samplers=1)
    assert all_left(replayed) == expected


def test_weights_that_are_spread_reach_every_sampler(copied):
    alone, apart = copied("alone"), copied("apart")
    for runner, samplers in ((alone, 0), (apart, 2)):
        go_through(runner, FUSED, GRPO, {}, 2, "fsdp", samplers=samplers)
    assert all_left(apart) == all_left(alone)


def test_one_rank_that_learns_beside_a_sampler_is_one_process(copied):
    """Also with an adapter, which is merged before it is sent."""
    alone, apart = copied("alone"), copied("apart")
    adapted = {**OVERLAP, "lora": {"rank": 4, "alpha": 8, "save": "adapter"}}
    for runner, samplers in ((alone, 0), (apart, 1)):
        go_through(runner, FUSED, GRPO, adapted, 1, "none", samplers=samplers)
    assert all_left(apart) == all_left(alone)


@pytest.mark.parametrize(("name", "lost"), [("overlap", 2), ("serial", 1)])
def test_a_lost_sampler_or_learner_is_named_and_others_go_on(copied, undisturbed, name, lost):
    """With another number of samplers."""
    runner = copied("killed")
    ranks = start(runner, FUSED, *DISTURBED[name], checkpoint_seconds=0.0, samplers=1)
    parts = runner.root / "jobs/online@fast/scratch/steps"
    at_work = lambda: any(parts.glob("*/scratch/parts/*/*"))  # noqa: E731
    until(at_work, "they sample", at_work=lambda: all(one.is_alive() for one in ranks))
    os.kill(ranks[lost].pid, signal.SIGKILL)
    others = [rank for rank in range(3) if rank != lost]
    for rank in others:
        ranks[rank].join(TIMEOUT_S)
        # The second, where it waits in a backend that can be told nothing.
        assert ranks[rank].exitcode in (4, 1)
        log = next((runner.root / "signs").glob(f"log-*-{rank}")).read_text()
        assert f"rank {lost}" in log
    go_through(runner, FUSED, *DISTURBED[name], checkpoint_seconds=0.0, samplers=2)
    assert all_left(runner) == undisturbed(name)


@pytest.mark.parametrize("name", DISTURBED)
def test_where_a_sampler_is_asked_to_stop_all_do(copied, undisturbed, name):
    runner = copied("stopped")
    stop_again_and_again(runner, name, rank=2, samplers=1)
    assert all_left(runner) == undisturbed(name)


if __name__ == RANK:
    main(globals()["OPTIONS"])
