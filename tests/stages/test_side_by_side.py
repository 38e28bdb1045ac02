"""Environments that are asked side by side: none waits for another, and who is faster changes no
byte; what becomes of those that fail, are slow, or never answer."""

import json
import threading
import time
from contextlib import closing

import pytest

from stages import rollout
from stages.context import StageError, Stopped
from stages.contracts.catalog import bind
from stages.contracts.episodes import EpisodeParams
from stages.environments.asking import Asking
from stages.environments.environment import NoAnswer
from tests.stages.test_environments import ECHO, ROLLOUT, SCORE, UPDATE, playing
from tests.waiting import FOR_EVER_S, TIMEOUT_S, must_not_wait

__all__ = ["playing"]

EVALUATE = "evaluate_sft"
CASES = (
    ECHO
    + f"""

import asyncio
import threading
import time
from pathlib import Path

FOLDER = Path(__file__).parent.parent
FOR_EVER_S = {FOR_EVER_S}
"""
    + '''
def mark(kind):
    """Leaves a file; how many of this kind there are now."""
    folder = FOLDER / kind
    folder.mkdir(exist_ok=True)
    (folder / str(time.monotonic_ns())).touch()
    return len(list(folder.iterdir()))


class Together(Echo):
    """Begins once all episodes want to."""

    barrier = threading.Barrier(18)

    def reset(self, row, seed):
        self.barrier.wait()
        super().reset(row, seed)


class Gathering(Echo):
    """The same, on a loop."""

    arrived = 0

    async def reset(self, row, seed):
        Gathering.arrived += 1
        while Gathering.arrived < 18:
            await asyncio.sleep(0.01)
        super().reset(row, seed)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self):
        mark("closed")


class Async(Echo):
    async def reset(self, row, seed):
        super().reset(row, seed)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)


class Counted(Echo):
    """Notes how many are asked at the same time."""

    lock = threading.Lock()
    now = most = 0

    def step(self, action):
        with self.lock:
            Counted.now += 1
            Counted.most = max(self.most, self.now)
        time.sleep(0.01)
        with self.lock:
            Counted.now -= 1
            (FOLDER / "most").write_text(str(self.most))
        return super().step(action)

    def close(self):
        mark("closed")


class Late(Echo):
    """Takes times of its own."""

    def step(self, action):
        time.sleep(time.monotonic_ns() % 13 / 300)
        return super().step(action)


class WaitsForOthers(Echo):
    """Those of the first unit answer once another unit has begun."""

    lock = threading.Lock()
    begun = 0
    others = threading.Event()

    def reset(self, row, seed):
        super().reset(row, seed)
        with self.lock:
            WaitsForOthers.begun += 1
            self.number = WaitsForOthers.begun

    def step(self, action):
        if self.number <= 4:
            self.others.wait()
        else:
            self.others.set()
        return super().step(action)


class Flaky(Echo):
    """The second answer of an episode fails twice."""

    lock = threading.Lock()
    failures = {}
    steps = 0

    def reset(self, row, seed):
        super().reset(row, seed)
        self.prompt = row["prompt_id"]

    def step(self, action):
        self.steps += 1
        with self.lock:
            failed = self.failures.get((self.prompt, action), 0)
            if self.steps == 2 and failed < 2:
                self.failures[self.prompt, action] = failed + 1
                raise ConnectionError("reset by peer")
        return super().step(action)


class Forgetful(Flaky):
    """Never says the same twice."""

    def step(self, action):
        return Observation(f"{mark('said')}=", done=super().step(action).done)


class Breaks(Echo):
    """Fails in the second turn of every third prompt, for good."""

    bad_at = 2
    steps = 0

    def reset(self, row, seed):
        super().reset(row, seed)
        self.steps, self.bad = 0, seed % 3 == 0
        if self.bad and self.bad_at == 0:
            raise LookupError("no such table")

    def step(self, action):
        self.steps += 1
        if self.bad and self.steps == self.bad_at:
            raise LookupError("no such row")
        self.left = max(self.left, 2)
        return super().step(action)


class BreaksAtOnce(Breaks):
    bad_at = 0


class AllBreak(Echo):
    def step(self, action):
        raise LookupError("nothing there")


class Never(Echo):
    """Says that it was asked, and then nothing."""

    def step(self, action):
        mark("asked")
        time.sleep(FOR_EVER_S)


class NeverAsync(Echo):
    async def step(self, action):
        mark("asked")
        await asyncio.sleep(FOR_EVER_S)


class Crashes(Flaky):
    """Takes its process along in the second turn of each prompt, once."""

    def step(self, action):
        import os

        self.steps += 1
        if self.steps == 2:
            try:
                (FOLDER / f"ended-{self.prompt}").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os._exit(7)
        return Echo.step(self, action)


class HangsOnce(Flaky):
    """Like a C library that never returns, once for each prompt."""

    def step(self, action):
        try:
            (FOLDER / f"ended-{self.prompt}").touch(exist_ok=False)
        except FileExistsError:
            return Echo.step(self, action)
        time.sleep(FOR_EVER_S)


class ClosesLate(Echo):
    """Some have been left, and do not let go, when others are asked and do not answer."""

    lock = threading.Lock()
    asked = 0

    def step(self, action):
        with self.lock:
            ClosesLate.asked += 1
            if self.asked == 1:
                return Observation(done=True)
        mark("asked")
        time.sleep(FOR_EVER_S)

    def close(self):
        time.sleep(FOR_EVER_S)


class Exits(Echo):
    async def step(self, action):
        raise SystemExit("goodbye")
'''
)


@pytest.fixture
def case(playing):
    """A run whose environment is one of the above."""

    def make(name, run="run", **changes):
        changes["rollout"] = {"environment": f"echo:{name}", **changes.get("rollout", {})}
        made = playing(run, **changes)
        (made.root / "environments/echo.py").write_text(CASES)
        return made

    return make


def rows_of(run):
    return run.contents(run.root / "artifacts/rollouts")


@must_not_wait
@pytest.mark.parametrize("name", ["Together", "Gathering"])
def test_all_episodes_of_a_unit_are_asked_at_the_same_time(case, name):
    """In a thread each, or on one loop: a barrier lets them go once all are there."""
    run = case(name, rollout={"batch_size": 18})
    plain = case("Echo", "plain", rollout={"batch_size": 18})
    for each in (run, plain):
        each.run(ROLLOUT)
    assert rows_of(run) == rows_of(plain)
    if name == "Gathering":
        assert len(list((run.root / "closed").iterdir())) == 18, "each is told that it is over"


def test_no_more_are_asked_at_a_time_than_are_allowed(case):
    run = case("Counted", episodes={"concurrency": 3}, rollout={"batch_size": 18})
    run.run(ROLLOUT)
    assert 1 < int((run.root / "most").read_text()) <= 3
    assert len(list((run.root / "closed").iterdir())) == 18


@must_not_wait
def test_while_one_unit_waits_another_is_generated(case):
    """The first unit's environments answer after the first turn of the second was generated."""
    run = case("WaitsForOthers")
    run.run(ROLLOUT)
    plain = case("Echo", "plain")
    plain.run(ROLLOUT)
    assert rows_of(run) == rows_of(plain)


def test_who_answers_first_changes_no_byte(case):
    plain, late, again = case("Echo", "plain"), case("Late", "late"), case("Late", "again")
    for run in (plain, late, again):
        run.run(ROLLOUT)
    assert rows_of(plain) == rows_of(late) == rows_of(again)


def test_an_answer_that_failed_is_asked_for_again(case):
    """Of an environment that is made anew and has heard the turns before."""
    plain = case("Echo", "plain")
    plain.run(ROLLOUT)
    assert any(row["loss_mask"].count(0) for row in plain.rows("rollouts/iter_001"))
    flaky = case("Flaky", "flaky", episodes={"retries": 2, "backoff": 0.01})
    flaky.run(ROLLOUT)
    assert rows_of(flaky) == rows_of(plain)
    once = case("Flaky", "once", episodes={"retries": 1, "backoff": 0.01})
    with pytest.raises(StageError, match="ConnectionError: reset by peer"):
        once.run(ROLLOUT)


def test_an_environment_that_is_made_anew_has_to_answer_as_before(case):
    run = case("Forgetful", episodes={"retries": 2, "backoff": 0.01})
    with pytest.raises(StageError, match="made anew after a failure, it answered the action"):
        run.run(ROLLOUT)


@pytest.mark.parametrize("name", ["Breaks", "BreaksAtOnce"])
def test_failed_episodes_are_dropped_with_all_samples_of_their_prompt(case, name):
    run, whole = case(name, episodes={"failed": "drop"}), case("Echo", "whole")
    metrics = run.run(ROLLOUT)
    whole.run(ROLLOUT)
    rows, asked = run.rows("rollouts/iter_001"), whole.rows("rollouts/iter_001")
    left = {row["prompt_id"] for row in rows}
    gone = {row["prompt_id"] for row in asked} - left
    assert left
    assert gone
    assert {"failed"}.isdisjoint(row["finish_reason"] for row in rows)
    assert all(sum(row["prompt_id"] == prompt for row in rows) == 3 for prompt in left)
    assert metrics["episodes"] == len(asked) == 18
    assert metrics["episodes_dropped"] == 3 * len(gone) == 18 - len(rows)
    assert 0 < metrics["episodes_failed"] <= metrics["episodes_dropped"]
    assert metrics["num_sequences"] == len(rows)
    failures = json.loads((run.context(ROLLOUT).folder / "tables/failed_episodes.json").read_text())
    assert len(failures) == metrics["episodes_failed"]
    assert all("LookupError: no such" in row["failure"] for row in failures)
    for stage in (SCORE, UPDATE):
        run.run(stage)


@pytest.mark.parametrize("name", ["Breaks", "BreaksAtOnce"])
def test_failed_episodes_end_with_the_reward_that_is_stated(case, name):
    changes = {"score": {"missing_eos_penalty": 9.0}, "rl": {"algorithm": "ppo"}}
    run = case(name, episodes={"failed": "end", "failed_reward": -0.75}, **changes)
    metrics = run.run(ROLLOUT)
    run.run(SCORE)
    rows = run.rows("rollouts/iter_001")
    failed = [row["finish_reason"] == "failed" for row in rows]
    assert metrics["episodes"] == len(rows) == 18
    assert metrics["episodes_failed"] == sum(failed) > 0
    assert metrics["episodes_dropped"] == 0
    for row, score, bad in zip(rows, run.rows("scores/iter_001"), failed, strict=True):
        assert sum(row["loss_mask"]) > 0, "the policy has said something"
        if bad:
            assert row["environment_reward"] == score["reward"] == -0.75, "no penalty beside it"
        else:
            assert row["environment_reward"] >= 0
    run.run(UPDATE)


def test_fused_steps_drop_what_chained_iterations_drop(case):
    names = ["fast_001", "fast_002"]
    rl = {
        "iterations": {"fast_001": {"policy": "sft"}, "fast_002": {"policy": "fast_001"}},
        "online": {"fast": {"policy": "sft", "steps": 2}},
    }
    run = case("Breaks", episodes={"failed": "drop"}, rl=rl)
    run.run_iterations(*names)
    run.run("online@fast")
    last = run.root / "artifacts/policies" / names[-1] / "model"
    assert run.contents(last.parents[1] / "fast/model") == run.contents(last)


def test_an_evaluation_drops_nothing(case):
    """Policies are compared on the same prompts."""
    run = case("Breaks", episodes={"failed": "drop"}, evaluate={"correct": "game", "samples": 2})
    metrics = run.run(EVALUATE)
    assert 0 < metrics["episodes_failed"] < metrics["episodes"]
    assert metrics["episodes"] == 3 * metrics["num_prompts"]
    assert "failed" in {row["finish_reason"] for row in run.rows("evaluations/sft/samples")}


def test_nothing_left_is_an_error(case):
    run = case("AllBreak", episodes={"failed": "drop"})
    with pytest.raises(StageError, match=r"every prompt failed.*LookupError: nothing there"):
        run.run(ROLLOUT)


@must_not_wait
@pytest.mark.parametrize("name", ["Never", "NeverAsync"])
def test_an_episode_has_a_time_limit_of_its_own(case, name):
    run = case(name, episodes={"timeout": 0.3, "answer_timeout": 4000.0})
    with pytest.raises(StageError, match=r"what was left of episodes.timeout 0.3 seconds"):
        run.run(ROLLOUT)


def test_what_an_async_environment_raises_is_named(case):
    with pytest.raises(StageError, match="SystemExit: goodbye"):
        case("Exits").run(ROLLOUT)


def test_a_turn_has_a_limit_of_its_own(case):
    run = case("Echo", episodes={"turn_tokens": 2})
    run.run(ROLLOUT)
    rows = run.rows("rollouts/iter_001")
    for row in rows:
        said = "".join(str(m) for m in row["loss_mask"])
        assert max(map(len, said.split("0"))) <= 2
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}


@must_not_wait
@pytest.mark.parametrize(
    ("name", "processes"),
    [("Never", 0), ("NeverAsync", 0), ("Never", 1), ("ClosesLate", 0), ("ClosesLate", 1)],
)
def test_a_job_is_stopped_while_all_wait(case, name, processes):
    """Nor does it wait for those that do not let go of what they have."""
    run = case(name, episodes={"answer_timeout": 4000.0, "processes": processes})
    bound, (inputs, outs) = bind(ROLLOUT, run.params), run.paths(ROLLOUT)
    ctx = run.context(ROLLOUT)

    def stop_it():
        while not (run.root / "asked").exists():
            time.sleep(0.02)
        ctx.request_stop()

    threading.Thread(target=stop_it, daemon=True).start()
    with pytest.raises(Stopped, match="between two turns"):
        rollout.run(bound.config, inputs, outs, ctx)


@pytest.mark.parametrize("name", ["Echo", "Async", "Crashes", "HangsOnce"])
def test_processes_answer_as_threads_do_whatever_ends_them(case, name):
    """An episode that loses its process to another goes on in the next one."""
    plain = case("Echo", "plain")
    plain.run(ROLLOUT)
    # Whoever is late without hanging is asked again, too.
    limits = {"retries": 9, "answer_timeout": 2.0} if name == "HangsOnce" else {"retries": 1}
    run = case(name, name, episodes={"processes": 2, "backoff": 0.0, **limits})
    run.run(ROLLOUT)
    assert rows_of(run) == rows_of(plain)
    assert bool(list(run.root.glob("ended-*"))) is (name in ("Crashes", "HangsOnce"))


def test_what_an_environment_raises_in_a_process_is_named(case):
    for name, problem in (
        ("Raises", "KeyError: 'no such tool'"),
        ("Mumbles", "answered with str, not with an Observation"),
        ("Infinite", "reward is inf"),
    ):
        run = case(name, name, episodes={"processes": 1})
        with pytest.raises(StageError, match=rf"step, after the action .*prompt.*: .*{problem}"):
            run.run(ROLLOUT)


@must_not_wait
def test_an_answer_in_a_process_has_a_limit(case):
    run = case("Never", episodes={"processes": 2, "answer_timeout": 0.3})
    with pytest.raises(StageError, match=r"no answer within episodes.answer_timeout 0.3 seconds"):
        run.run(ROLLOUT)


CLOSES = '''
import time
from pathlib import Path

from stages.environments.environment import Environment, Observation


class Closes(Environment):
    """Fails as the row says; notes each thing that it is told."""

    def note(self, what):
        with open(Path(__file__).with_name("told"), "a") as told:
            told.write(f"{what}\\n")

    def reset(self, row, seed):
        self.how = row["prompt"]
        if self.how == "at the start":
            raise LookupError("no such row")

    def step(self, action):
        if self.how == "late":
            while not Path(__file__).with_name("given-up").exists():
                time.sleep(0.01)
            self.note("returned")
        if self.how != "never":
            raise LookupError("no such page")
        return Observation("hm")

    def close(self):
        self.note("closed")
'''


FAILS = """
import time
from pathlib import Path

from stages.environments.environment import Environment


class Fails(Environment):
    def reset(self, row, seed):
        with open(Path(__file__).with_name("tried"), "a") as tried:
            tried.write(f"{time.monotonic()}\\n")
        raise ConnectionError("no route")

    def step(self, action):
        raise AssertionError
"""


def test_each_retry_comes_after_twice_the_pause_of_the_one_before(tmp_path):
    (tmp_path / "own.py").write_text(FAILS)
    with closing(Asking(EpisodeParams(retries=2, backoff=0.3), "own:Fails", tmp_path)) as asking:
        [answer] = asking.begin([asking.seat({"prompt": "", "extra": {}}, 0)]).result()
    assert "no route" in str(answer)
    first, second, third = map(float, (tmp_path / "tried").read_text().split())
    assert second - first >= 0.3
    assert third - second >= 0.6


TAKES_TIME = '''
import asyncio
import time
from pathlib import Path

from stages.environments.environment import Environment, Observation


class TakesTime(Environment):
    """Answers in nearly all of its episode's time; then closes."""

    def reset(self, row, seed):
        pass

    def step(self, action):
        time.sleep(1.8)
        return Observation(done=True)

    async def close(self):
        await asyncio.sleep(0.5)
        Path(__file__).with_name("closed").touch()
'''


@pytest.mark.parametrize("processes", [0, 1])
def test_closing_takes_nothing_of_the_time_that_answers_have(tmp_path, processes):
    """A process of theirs would be ended for it, with the episodes of others."""
    (tmp_path / "own.py").write_text(TAKES_TIME)
    params = EpisodeParams(timeout=2.2, processes=processes)
    with closing(Asking(params, "own:TakesTime", tmp_path)) as asking:
        seats = [asking.seat({"prompt": "", "extra": {}}, 0)]
        asking.begin(seats).result()
        [answer] = asking.step(seats, ["1"]).result()
        asking.leave(seats)
    assert not isinstance(answer, NoAnswer), answer
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("how", ["never", "at the start", "in a turn", "late"])
def test_what_has_failed_is_closed_too_after_it_has_come_back(
    tmp_path, monkeypatch, how, processes
):
    monkeypatch.setattr("stages.environments.asking.GIVE_UP_S", TIMEOUT_S)
    (tmp_path / "own.py").write_text(CLOSES)
    late = how == "late"
    params = EpisodeParams(answer_timeout=TIMEOUT_S, processes=processes)
    with closing(Asking(params, "own:Closes", tmp_path)) as asking:
        seats = [asking.seat({"prompt": how, "extra": {}}, 0)]
        [answer] = asking.begin(seats).result()
        if not isinstance(answer, NoAnswer):
            # It is there: from here on a second is long.
            asking._params = EpisodeParams(answer_timeout=1.0 if late else TIMEOUT_S)
            [answer] = asking.step(seats, ["1"]).result()
        (tmp_path / "given-up").touch()
        asking.leave(seats)
    assert isinstance(answer, NoAnswer) is (how != "never")
    noted = tmp_path / "told"
    told = noted.read_text().split() if noted.exists() else []
    # A process that is late is ended.
    assert told == ([] if late and processes else ["returned"] * late + ["closed"])
