"""Steps in one process: the bytes of the staged loop, whatever stops or kills them."""

import json
import shutil
import signal
from concurrent.futures import Executor, Future
from types import SimpleNamespace

import pytest
import torch

from stages import online
from stages.context import StageError, Stopped
from stages.contracts.params import Params
from stages.contracts.rollout import Engine
from stages.engines.generation import resident_sampler, vllm_generator
from stages.engines.generation.resident_sampler import ResidentSampler
from stages.engines.generation.torch_generator import TorchGenerator
from stages.engines.models import loaders
from stages.engines.models.folders import load_policy
from stages.engines.models.loaders import Loaders, load_classifier
from stages.engines.training.journal import Journal
from tests.models.test_reward_folders import write_classifier
from tests.stages import conftest
from tests.stages.conftest import Runner
from tests.stages.forks import FORKS
from tests.waiting import TIMEOUT_S, until

NAMES = ["fast_001", "fast_002", "fast_003"]
CHAINED = {name: {"policy": parent} for name, parent in zip(NAMES, ["sft", *NAMES], strict=False)}
GRPO = {"algorithm": "grpo", "reward": "verifier"}
PPO = {"algorithm": "ppo", "reward": "reward_model"}
OVERLAP = {
    "online": {"overlap": True},
    "policy_update": {"mismatch": "token_truncate", "max_logprob_gap": 1.0},
}
ROWS = ("rollouts/{}", "tool_answers/{}", "scores/{}", "policies/{}/experience")


def made_by(root, rl, changes):
    rl = {"teacher": "artifacts/base", "iterations": CHAINED, **rl}
    return Runner(root, rl={"online": {"fast": {"policy": "sft", "steps": 3}}, **rl}, **changes)


@pytest.fixture
def fused(trained, tmp_path):
    """A copy of the trained run whose policy `fast` is made by three fused steps."""

    def copy(name, rl=GRPO, **changes):
        runner = made_by(tmp_path / name, rl, changes)
        shutil.copytree(trained.root, runner.root, dirs_exist_ok=True)
        return runner

    return copy


def contents(runner):
    """All that the stage has made, and what it said of each step."""
    paths = [f"artifacts/policies/fast/{part}" for part in ("model", "state")]
    paths += [f"artifacts/{path.format('fast')}.parquet" for path in ROWS]
    lines = (runner.root / "jobs/online@fast/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    said = [(row["step"], row["metrics"]["reward_mean"], row["metrics"]["loss"]) for row in rows]
    return {path: runner.contents(runner.root / path) for path in paths}, said


WITHOUT_KL = {"score": {"reference": False}, "policy_update": {"kl_coef": 0.0}}


@pytest.mark.parametrize(
    ("rl", "changes"),
    [(GRPO, WITHOUT_KL), (PPO, {"policy_update": {"kl_target": 0.1}})],
    ids=["grpo", "ppo"],
)
def test_fused_steps_end_with_the_bytes_of_chained_iterations(fused, rl, changes):
    runner = fused("run", rl, **changes)
    staged = runner.run_iterations(*NAMES)
    metrics = runner.run("online@fast")
    for part in ("model", "state"):
        last = runner.root / "artifacts/policies" / NAMES[-1] / part
        assert runner.contents(last.parents[1] / "fast" / part) == runner.contents(last)
    for path in ROWS:
        together = runner.rows(path.format("fast"))
        for step, name in enumerate(NAMES, 1):
            own = [{**row} for row in together if row["step"] == step]
            alone = runner.rows(path.format(name))
            assert own == [{"step": step, **row} for row in alone]
    assert metrics["num_steps"] == 3 * staged.pop("num_steps")
    assert {name: metrics[name] for name in staged} == staged
    assert ("kl_to_reference" in metrics) is (rl is PPO)
    assert [step for step, *_ in contents(runner)[1]] == [1, 2, 3]


class AskedAt(list):
    """A request to stop that comes when the stage asks for the nth time."""

    def __init__(self, countdown):
        super().__init__([False])
        self.countdown = countdown

    def __getitem__(self, index):
        self.countdown -= 1
        return self.countdown < 0


@pytest.mark.parametrize("changes", [{}, OVERLAP], ids=["serial", "overlap"])
@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["every step saved", "saved when stopped"])
def test_stopped_at_every_question_the_stage_ends_with_the_same_bytes(fused, changes, seconds):
    update = {"kl_target": 0.1, **changes.get("policy_update", {})}
    changes = {**changes, "policy_update": update}
    undisturbed, stopped = fused("undisturbed", PPO, **changes), fused("stopped", PPO, **changes)
    undisturbed.run("online@fast")
    for _ in range(200):
        ctx = stopped.context("online@fast", checkpoint_seconds=seconds, _stop=AskedAt(9))
        try:
            stopped.run("online@fast", ctx)
            break
        except Stopped:
            continue
    assert contents(stopped) == contents(undisturbed)


def test_a_step_that_nothing_could_go_on_from_is_seen_through(fused, monkeypatch):
    """Its learners have begun to move, and nothing of it is on the disk."""
    runner = fused("run")
    ctx = runner.context("online@fast", checkpoint_seconds=1e9)
    really_learn, learnt = online.learn, []

    def learn(*arguments):
        learnt.append(arguments)
        if len(learnt) == 2:
            ctx.request_stop()
        return really_learn(*arguments)

    monkeypatch.setattr(online, "learn", learn)
    with pytest.raises(Stopped, match="stopped after step 2 of 3"):
        runner.run("online@fast", ctx)


def live(begun, root, rl, changes):
    torch.set_num_threads(1)
    # The scratch is cleared once the outputs are published: half of it is never met again.
    conftest.shutil = SimpleNamespace(rmtree=lambda _: None)
    resume = Journal.resume
    Journal.resume = lambda journal: (resume(journal), begun.set())
    runner = made_by(root, rl, changes)
    runner.run("online@fast", runner.context("online@fast", checkpoint_seconds=0.3))


@pytest.mark.parametrize("changes", [{}, OVERLAP], ids=["serial", "overlap"])
def test_killed_at_any_moment_it_ends_with_the_same_bytes(fused, changes):
    undisturbed, killed = fused("undisturbed", **changes), fused("killed", **changes)
    undisturbed.run("online@fast")
    for timeout_s in [0.1, 0.4, 0.7, TIMEOUT_S]:
        shutil.rmtree(killed.root / "artifacts/policies/fast", ignore_errors=True)
        begun = FORKS.Event()
        process = FORKS.Process(target=live, args=(begun, killed.root, GRPO, changes))
        process.start()
        until(begun.is_set, "a life to begin", at_work=process.is_alive)
        process.join(timeout_s)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:
            break
    made, said = contents(killed)
    wanted, expected = contents(undisturbed)
    assert [path for path in wanted if made[path] != wanted[path]] == []
    assert said == expected


class OneAfterTheOther(Executor):
    """Does the work of a thread before who asked for it goes on."""

    def __init__(self, *_):
        pass

    def submit(self, work, *arguments):
        future = Future()
        future.set_result(work(*arguments))
        return future


def test_overlapping_in_threads_is_the_same_schedule_one_after_the_other(fused, monkeypatch):
    threads, serial = fused("threads", **OVERLAP), fused("serial", **OVERLAP)
    threads.run("online@fast")
    monkeypatch.setattr(online, "ThreadPoolExecutor", OneAfterTheOther)
    serial.run("online@fast")
    assert contents(threads) == contents(serial)
    rows = threads.rows(ROWS[0].format("fast"))
    by = {step: {row["policy_hash"] for row in rows if row["step"] == step} for step in (1, 2, 3)}
    assert by[1] == by[2] != by[3], "the second step has samples of the policy before the first"
    assert all(len(hashes) == 1 for hashes in by.values())


def test_a_sampler_that_stays_behind_is_noticed(fused, monkeypatch):
    runner = fused("run", policy_update={"learning_rate": 1e-2, "max_logprob_gap": 1e-3})
    monkeypatch.setattr(ResidentSampler, "take", once(ResidentSampler.take))
    with pytest.raises(StageError, match="trainer and sampler log-probs differ"):
        runner.run("online@fast")


def once(method):
    """The method, which does nothing from the second call on."""
    called = []
    return lambda self: called.append(self) or (method(self) if len(called) == 1 else None)


def test_rows_that_were_damaged_since_are_made_again(fused):
    undisturbed, stopped = fused("undisturbed"), fused("stopped")
    undisturbed.run("online@fast")
    ctx = stopped.context("online@fast", checkpoint_seconds=0.0)
    ctx.log = lambda step, _: step == 2 and ctx.request_stop()
    with pytest.raises(Stopped, match="after step 2"):
        stopped.run("online@fast", ctx)
    path = ctx.scratch / "rows/scores/000002.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    stopped.run("online@fast")
    assert contents(stopped) == contents(undisturbed)


class GivenWeights:
    """In the place of vLLM, which draws other tokens: an engine that is given weights and answers
    as the torch generator does."""

    def __init__(self, folder, settings, *, empty):
        assert empty, "its weights come through memory"
        self.policy_hash, self.told = "", []
        self._model = load_policy(folder, settings.device, settings.precision)
        self._torch = TorchGenerator(settings.device, settings.precision, settings.slots)

    def take(self, weights):
        self.told.append("take")
        own = self._model.state_dict()
        for name, weight in weights:
            own[name].copy_(weight)

    def compare(self, weights):
        self.told.append("compare")
        own = self._model.state_dict()
        assert all(torch.equal(own[name], weight) for name, weight in weights)

    def generate(self, requests, **how):
        self._torch.take(self._model, self.policy_hash, compared=False, owned=True)
        return self._torch.generate(requests, **how)

    def sleep(self):
        self.told.append("sleep")

    def close(self):
        self.told.append("close")


def test_an_engine_that_is_given_weights_samples_the_same(fused, monkeypatch):
    resident, apart, stopped = fused("resident"), fused("apart"), fused("stopped")
    resident.run("online@fast")
    opened = []

    def open_engine(*how, **options):
        opened.append(GivenWeights(*how, **options))
        return opened[-1]

    monkeypatch.setattr(resident_sampler, "choose", lambda *_: Engine.VLLM)
    monkeypatch.setattr(vllm_generator, "VllmGenerator", open_engine)
    apart.run("online@fast")
    assert contents(apart) == contents(resident)
    a_step = ["take", "compare", "sleep"]
    assert [engine.told for engine in opened] == [[*a_step * 3, "close"]]

    opened.clear()
    ctx = stopped.context("online@fast")
    ctx.log = lambda *_: ctx.request_stop()
    with pytest.raises(Stopped):
        stopped.run("online@fast", ctx)
    assert [engine.told for engine in opened] == [[*a_step, "close"]]


def test_a_reward_model_that_a_user_gives_is_read_once_and_stays(fused, monkeypatch):
    read = []

    def counted(folder, *rest):
        read.append(folder.name)
        return load_classifier(folder, *rest)

    monkeypatch.setattr(loaders, "FRESH", Loaders(classifier=counted))
    given = {"rewards": {"taste": {"kind": "model", "folder": "rm", "form": "pair"}}}
    runner = fused("run", score={"weights": {"verifier": 1.0, "taste": 0.5}}, **given)
    write_classifier(runner.root / "rewards/rm")
    for stage in ("rollout", "score"):
        runner.run(f"{stage}@fast_001")
    assert read == ["rm"]  # a stage by itself reads it for itself
    runner.run("online@fast")
    assert read == ["rm", "rm"]
    staged, together = (runner.rows(f"scores/{name}") for name in ("fast_001", "fast"))
    said = [dict(row["by_source"])["taste"] for row in staged]
    assert said == [dict(row["by_source"])["taste"] for row in together if row["step"] == 1]
    assert len(set(said)) > 1


def test_an_adapter_learns_in_fused_steps_as_in_iterations(copied):
    lora = {"rank": 4, "save": "adapter", "targets": ["q_proj", "v_proj"]}
    rl = {**GRPO, "iterations": CHAINED, "online": {"fast": {"policy": "sft", "steps": 2}}}
    made = copied("run", rl={**rl, "teacher": "artifacts/base"}, lora=lora)
    made.run_iterations(*NAMES[:2])
    made.run("online@fast")
    policies = made.root / "artifacts/policies"
    for part in ("model", "state"):
        assert made.contents(policies / "fast" / part) == made.contents(policies / NAMES[1] / part)


def test_a_model_whose_files_vllm_could_not_be_given_is_refused(fused, monkeypatch):
    """Before anything is sampled, and by those that learn: samplers have no model."""
    runner = fused("run")
    monkeypatch.setattr(online, "choose", lambda *_: Engine.VLLM)
    monkeypatch.setattr(resident_sampler, "is_rearranged", lambda model: model is not None)
    with pytest.raises(StageError, match=r"arranged in another way .* set rollout\.engine: torch"):
        runner.run("online@fast")


def test_what_fused_steps_cannot_do_is_refused():
    rl = {"online": {"fast": {"policy": "sft", "steps": 2}}}
    for changes, said in (
        ({"online": {"overlap": True}}, "set policy_update.mismatch"),
        ({"lora": {"rank": 2}}, "set lora.save to adapter"),
        ({"score": {"reference": False}}, "set kl_coef to 0"),
    ):
        with pytest.raises(ValueError, match=said):
            Params.model_validate({"rl": rl, **changes})
