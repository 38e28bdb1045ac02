"""The process that plays environments of verifiers, with stand-ins that read late or break off."""

import asyncio
import json
import subprocess
import sys
import threading
import time

import pytest

from stages.environments import verifiers_process, verifiers_worker
from stages.environments.environment import NoAnswer
from stages.environments.verifiers_process import Order, Process
from tests.waiting import FOR_EVER_S, TIMEOUT_S, must_not_wait, until

READY = """echo '{"ready": true}'; read order; """
ANSWERS = """
n=0
while read question; do
    case "$question" in
        *cancel*) ;;
        *) echo "{\\"n\\": $n, \\"reward\\": 1}"; n=$((n + 1)) ;;
    esac
done
"""
BREAKS_OFF = """read question; printf '{"n": 0, "rew'; kill -9 $$"""


@pytest.fixture
def order(tmp_path):
    """For an interpreter that is this script, in place of Python's."""

    def ordered(script, **arguments):
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        return Order(str(python), "toys", arguments, {}, (), tmp_path)

    return ordered


def played(order, play):
    """What a coroutine makes of the process."""

    async def in_a_loop():
        process = Process(order)
        try:
            return await asyncio.wait_for(play(process), TIMEOUT_S)
        finally:
            await process.close()

    return asyncio.run(in_a_loop())


def test_a_question_that_is_given_up_as_its_answer_comes_does_not_end_the_process(
    order, monkeypatch
):
    """In whichever turn of the loop."""
    monkeypatch.setattr(verifiers_process, "LETS_GO_S", 3.0)

    async def play(process):
        assert await process.ask({}) == {"n": 0, "reward": 1}
        for turns in range(6):
            question = asyncio.create_task(process.ask({}))
            await asyncio.sleep(0)
            time.sleep(0.2)  # the answer is there, and the loop stands still
            for _ in range(turns):
                await asyncio.sleep(0)
            question.cancel()
            await asyncio.wait({question})
        await asyncio.sleep(3.5)  # for longer than one that holds on may
        return await process.ask({})

    assert played(order(READY + ANSWERS), play)["reward"] == 1


@must_not_wait
def test_a_process_that_does_not_read_keeps_nobody_waiting(order):
    """More than the pipe holds: whoever has a time limit is late, and no later."""

    async def play(process):
        questions = [process.ask({"play": "x" * 40_000}) for _ in range(8)]
        done, late = await asyncio.wait(map(asyncio.ensure_future, questions), timeout=0.5)
        for question in late:
            question.cancel()
        return len(done), len(late)

    assert played(order(READY + f"exec sleep {FOR_EVER_S}"), play) == (0, 8)


def test_arguments_that_are_not_json_are_named_before_a_process_starts(order, tmp_path):
    with pytest.raises(NoAnswer, match=r"'toys'.* not JSON: Object of type set is not"):
        played(order("touch started; " + READY, size={1, 2}), lambda process: process.ask({}))
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("script", [READY + BREAKS_OFF, "echo Welcome; exec sleep 60"])
def test_what_is_not_a_whole_answer_is_the_end_of_the_process(order, script):
    with pytest.raises(NoAnswer, match="its process was ended by SIGKILL"):
        played(order(script), lambda process: process.ask({}))


STAND_IN = """
import asyncio
import time
from pathlib import Path


class Rubric:
    funcs, weights = (), ()


class Environment:
    rubric = Rubric()

    async def run_rollout(self, row, *_):
        if row["does"] == "block":
            Path("blocks").touch()
            while not Path("go").exists():
                time.sleep(0.01)
        else:
            await asyncio.sleep(3600)
        return {"reward": 1.0}


def load_environment(*_):
    return Environment()


def OpenAIChatCompletionsClient(client):
    return client


class Stub:
    def __init__(self, **_):
        pass

    def with_options(self, **_):
        return self


AsyncOpenAI = DefaultAsyncHttpxClient = Stub
DEFAULT_CONNECTION_LIMITS = Stub()
"""


def test_what_is_cancelled_before_it_has_begun_is_answered(tmp_path):
    for name in ("openai", "toys", "verifiers"):
        (tmp_path / f"{name}.py").write_text(STAND_IN)
    # Without packages, so that these are the ones that are found.
    words, pipe = [sys.executable, "-S", verifiers_worker.__file__], subprocess.PIPE
    with subprocess.Popen(
        words, stdin=pipe, stdout=pipe, text=True, cwd=tmp_path, start_new_session=True
    ) as worker:
        limit = threading.Timer(TIMEOUT_S, worker.kill)
        limit.start()

        def say(**message):
            worker.stdin.write(json.dumps(message) + "\n")
            worker.stdin.flush()

        say(environment="toys", arguments={}, weights={}, folder=str(tmp_path))
        assert json.loads(worker.stdout.readline()) == {"ready": True}
        say(n=1, play={"does": "block"}, base_url="")
        until((tmp_path / "blocks").exists, "the loop stands still", at_work=worker)
        say(n=2, play={"does": "wait"}, base_url="")
        say(n=2, cancel=True)
        time.sleep(0.5)  # for both to be heard
        (tmp_path / "go").touch()
        answers = [json.loads(worker.stdout.readline() or "{}") for _ in range(2)]
        limit.cancel()
    assert answers == [{"n": 1, "reward": 1.0}, {"n": 2, "refused": "it was cancelled"}]
