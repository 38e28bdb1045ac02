"""Environments of verifiers, played by the real package in the Python environment that has it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from stages.contracts.episodes import EpisodeParams
from stages.data.dialogue import Dialogue
from stages.data.formats.messages import messages_of, tools_of
from stages.data.offered_tools import tools_hash
from stages.data.seeds import stable_hash
from stages.environments import verifiers_process, verifiers_worker, write_prompts
from stages.environments.agent_requests import Route
from stages.environments.asking import Asking
from stages.environments.chat_server import ChatServer
from stages.environments.environment import NoAnswer, Observation
from stages.environments.loading import find
from stages.environments.spoken import Sampled
from stages.environments.verifiers_process import Order
from tests.stages.test_environments import ROLLOUT, playing
from tests.waiting import TIMEOUT_S, must_not_wait, until

__all__ = ["playing"]

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(sys.prefix) / "verifiers"
TOYS = Path(__file__).with_name("verifiers_toys.py")
MODULE = f"""
from stages.environments.verifiers_env import Verifiers


class Echo(Verifiers):
    python = {str(VENV)!r}
    id = "verifiers-toys"


class Stopped(Echo):
    stops = (";",)


class Named(Echo):
    weights = {{"turns": 0.5}}
    env = ("TESTS_VARIABLE",)


class Tools(Echo):
    arguments = {{"kind": "tools"}}
    role = "tool"


class NoPython(Echo):
    python = "no-such-folder/${{TESTS_VARIABLE}}"


class NoPackage(Echo):
    python = {sys.executable!r}


class NoEnvironment(Echo):
    id = "someone/no-such-game"


class NoArgument(Echo):
    id = "no_arguments"
    arguments = {{"size": 3}}


class NoWeight(Echo):
    weights = {{"turn": 0.5}}


class Broken(Echo):
    arguments = {{"kind": "broken"}}


class Group(Echo):
    arguments = {{"kind": "group"}}
"""
QUESTION = [{"role": "user", "content": "1+2="}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not (VENV / "bin/python").exists():
        pytest.fail("verifiers is not installed for the tests: make .venv/.verifiers")
    folder = tmp_path_factory.mktemp("environments")
    (folder / "own.py").write_text(MODULE)
    (folder / "verifiers_toys.py").write_text(TOYS.read_text())
    (folder / "no_arguments.py").write_text("def load_environment(): ...\n")
    return folder


def row(**info):
    example = {"example_id": 0, "prompt": QUESTION, "answer": "3", "info": info}
    return {"prompt_id": "p", "prompt": "1+2=", "answer": "3", "extra": {"example": example}}


class Episodes:
    """Some that are played side by side, by one process."""

    def __init__(self, folder, name="Echo", module="own", **params):
        self.asking = Asking(
            EpisodeParams(**{"answer_timeout": 600, **params}), f"{module}:{name}", folder
        )

    def begin(self, *rows):
        self.seats = [self.asking.seat(row, 0) for row in rows]
        return self.asking.begin(self.seats).result()

    def say(self, *actions):
        return self.asking.step(self.seats, actions).result()

    def close(self):
        self.asking.leave(self.seats)
        self.asking.close()


@pytest.fixture(scope="module")
def shared(folder):
    """One process for all tests that leave it as it was."""
    os.environ["TESTS_VARIABLE"] = "a-secret-of-the-tests"
    with closing(Episodes(folder, "Named")) as episodes:
        yield episodes
    del os.environ["TESTS_VARIABLE"]


def test_an_episode_is_the_rollout_that_verifiers_makes(shared):
    """Side by side; paid by the weights of the class."""
    begun = shared.begin(row(turns=2, name="7"), row(turns=1, name="8"), row(turns=3, name="9"))
    assert begun == [Observation()] * 3
    said = shared.say("four", "two", "three")
    over = Observation(reward=0.5 * 1, done=True)
    assert said == [Observation("4+7="), over, Observation("5+9=")]
    shared.seats = shared.seats[::2]
    assert shared.say("1", "22") == [Observation(reward=0.5 * 2, done=True), Observation("2+9=")]


def test_the_process_has_packages_of_its_own_and_no_variables_but_those_that_are_named(shared):
    shared.begin(row(does="where"))
    [where] = shared.say("hm")
    prefix, version, variables = where.text.split(" ", 2)
    assert prefix == str(VENV)
    assert "PATH" in variables
    assert "TESTS_VARIABLE" in variables
    assert "PYTEST_CURRENT_TEST" not in variables
    assert "verifiers" not in sys.modules
    assert version
    found = subprocess.run(
        [sys.executable, "-c", "import verifiers"], cwd="/", capture_output=True, check=False
    )
    assert found.returncode


def test_what_a_reward_function_raises_fails_its_episode_alone(shared):
    """verifiers would make a reward of 0 of it."""
    shared.begin(row(does="unscored", turns=1), row(turns=1))
    failed, fine = shared.say("a", "b")
    assert isinstance(failed, NoAnswer)
    assert "a reward function failed: said: LookupError: no such answer" in str(failed)
    assert fine == Observation(reward=0.5, done=True)


def test_what_the_environment_raises_fails_its_episode_and_a_silent_turn_does_not(shared):
    failed, begun = shared.begin(row(does="raise"), row(turns=3, name="7"))
    assert "no more words" in str(failed)
    assert "verifiers environment 'verifiers-toys'" in str(failed)
    assert begun == Observation()
    shared.seats = shared.seats[1:]
    # Of a turn without a word verifiers makes an end, and scores what there is.
    assert shared.say("") == [Observation(reward=0.0, done=True)]


def test_a_row_without_its_example_is_refused(shared):
    [refused] = shared.begin({**row(), "extra": {}})
    assert "the row has no `example`" in str(refused)


PROBLEMS = {
    "NoPython": "no-such-folder/${TESTS_VARIABLE}', and there is no interpreter",
    "NoPackage": "verifiers cannot be imported",
    "Group": "rewards the rollouts of a group together",
}
REFUSED = {
    "NoEnvironment": "there is no environment 'someone/no-such-game'",
    "NoArgument": "load_environment of 'no_arguments' has no argument 'size', only none",
    "NoWeight": "the rubric has no 'turn', only said, turns",
    "Broken": "the environment 'verifiers-toys' does not load: RuntimeError: Failed to load",
}
LOADS_ALL = """
import importlib.util, json, sys
found = importlib.util.spec_from_file_location("worker", sys.argv[1])
worker = importlib.util.module_from_spec(found)
found.loader.exec_module(worker)
said = []
for order in json.loads(sys.argv[2]):
    try:
        said.append(repr(worker.Player(order)))
    except worker.Refusal as refusal:
        said.append(str(refusal))
print(json.dumps(said))
"""


def test_what_cannot_be_played_says_why(folder, monkeypatch):
    """All processes start at once: most of a start is importing verifiers."""
    monkeypatch.setenv("TESTS_VARIABLE", "nowhere")
    opened = {name: Episodes(folder, name) for name in PROBLEMS}
    begun = {name: each.asking.begin([each.asking.seat(row(), 0)]) for name, each in opened.items()}
    for name, why in PROBLEMS.items():
        [answer] = begun[name].result()
        assert isinstance(answer, NoAnswer), name
        assert why in str(answer), name
        opened[name].asking.close()


def test_what_does_not_load_is_refused(folder):
    """By what the process runs, in one for all."""
    orders = []
    for name in REFUSED:
        kind = find(f"own:{name}", folder)
        order = Order(kind.python, kind.id, kind.arguments, kind.weights, kind.env, folder)
        orders.append(order.message())
    words = [VENV / "bin/python", "-c", LOADS_ALL, verifiers_worker.__file__, json.dumps(orders)]
    done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    for why, said in zip(REFUSED.values(), json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert why in said


def test_a_verifiers_without_load_environment_is_named(tmp_path):
    """As from 0.4.0 on: a stand-in, since one environment has one version."""
    (tmp_path / "own.py").write_text(MODULE)
    (tmp_path / "verifiers.py").write_text("__version__ = '0.4.0'\n")
    (tmp_path / "verifiers_toys.py").write_text("")
    with closing(Episodes(tmp_path, "NoPackage")) as episodes:
        [answer] = episodes.begin(row())
    assert "verifiers 0.4.0 has no load_environment: pip install 'verifiers>=0.1.14,<0.4'" in str(
        answer
    )


def test_a_process_that_ends_is_replaced_and_its_episodes_are_played_again(folder):
    once = folder / "exited"
    once.unlink(missing_ok=True)
    with closing(Episodes(folder, retries=1, backoff=0.1)) as episodes:
        episodes.begin(row(does="exit", name="7"), row(name="8"))
        assert episodes.say("a", "bb") == [Observation("1+7="), Observation("2+8=")]
        assert once.exists()
        once.unlink()
        episodes.asking._params = EpisodeParams(answer_timeout=600, retries=0)
        episodes.begin(row(does="exit", name="7"), row(name="8"))
        answers = episodes.say("a", "bb")
        assert once.exists()
        assert "exited with code 3; what it wrote is in the log" in str(answers[0])


@must_not_wait
def test_one_that_blocks_the_process_is_late_and_ends_it(folder):
    with closing(Episodes(folder)) as episodes:
        episodes.begin(row(turns=1))
        assert episodes.begin(row(does="block")) == [Observation()]
        # It has imported everything: from here on a second is long.
        episodes.asking._params = EpisodeParams(answer_timeout=2)
        assert "no answer within" in str(episodes.say("a")[0])
        episodes.asking._params = EpisodeParams(answer_timeout=150, retries=1)
        assert episodes.begin(row(turns=1)) == [Observation()]
        assert episodes.say("four") == [Observation(reward=1.0, done=True)]


HASTY = """
from stages.environments import verifiers_process

verifiers_process.LETS_GO_S = 3.0
"""


def test_one_that_lets_go_leaves_the_others_of_its_lane_alone(folder, monkeypatch):
    """Where nobody is asked meanwhile, as while the policy generates.

    And with the stage ends all that the environment has started.
    """
    monkeypatch.setattr(verifiers_process, "LETS_GO_S", 3.0)
    (folder / "hasty.py").write_text(MODULE + HASTY)
    with closing(Episodes(folder, module="hasty", processes=1)) as episodes:
        episodes.begin(row(name="7"), row(name="8"))
        left, stays = episodes.seats
        episodes.asking.leave([left])
        time.sleep(4)
        episodes.seats = [stays]
        assert episodes.say("four") == [Observation("4+8=")]
        episodes.asking.leave([stays])
        episodes.begin(row(does="daemon"))
        [told] = episodes.say("a")
        assert psutil.pid_exists(int(told.text))
    until(lambda: not psutil.pid_exists(int(told.text)), "the daemon has ended")


STAGE = """
import sys
from pathlib import Path
from stages.contracts.episodes import EpisodeParams
from stages.environments.asking import Asking
import json
asking = Asking(EpisodeParams(answer_timeout=600), "own:Echo", Path(sys.argv[1]))
seats = [asking.seat(json.loads(sys.argv[2]), 0)]
asking.begin(seats).result()
print(asking.step(seats, ["a"]).result()[0].text, flush=True)
sys.stdin.read()
"""


def test_the_process_ends_with_a_stage_that_is_killed_and_so_does_what_it_has_started(folder):
    words = [sys.executable, "-c", STAGE, str(folder), json.dumps(row(does="daemon"))]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as stage:
        daemon = psutil.Process(int(stage.stdout.readline()))
        [process] = psutil.Process(stage.pid).children()
        stage.send_signal(signal.SIGKILL)
        until(lambda: not process.is_running(), "the process has ended")
        daemon.wait(TIMEOUT_S)  # which was to end before it


def test_prompts_are_the_rows_of_its_dataset_with_its_tools(folder, capsys):
    file = folder / "prompts.jsonl"
    words = ["own:Tools", str(file), "--environments", str(folder), "--number"]
    assert write_prompts.main([*words, "9"]) == 0
    assert "6 different prompts of 7 rows" in capsys.readouterr().out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    system = {"role": "system", "content": "You add."}
    assert rows[5]["prompt"] == [system, {"role": "user", "content": "1+2="}]
    assert rows[5]["answer"] == "3"
    [tool] = rows[5]["tools"]
    assert tool["function"]["name"] == "add"
    played = [as_prepared(each) for each in rows]
    with closing(Episodes(folder, "Tools")) as episodes:
        assert episodes.begin(played[5], played[0]) == [Observation()] * 2
        call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": %d}}</tool_call>'
        both, error = episodes.say(call % 2 + call % 3, call.replace("add", "sub") % 1)
        assert both == Observation("3\n4")
        assert "sub" in error.text
        assert episodes.say("3", "1") == [Observation("", 1.0, True), Observation("", 0.0, True)]
        [other] = episodes.begin({**played[5], "prompt": "1+3="})
        assert "the agent's first request is not the row's prompt" in str(other)
    assert write_prompts.main([*words, "9", "--evaluation"]) == 0
    [held_out] = [json.loads(line) for line in file.read_text().splitlines()]
    assert held_out["answer"] == "15"


def as_prepared(row):
    """As prepare leaves a row of the data, for the environment."""
    dialogue = Dialogue(tuple(messages_of(row["prompt"], "prompt", "user")), tools_of(row["tools"]))
    extra = {"example": row["example"], "tools": tools_hash(dialogue.tools)}
    return {"prompt_id": "p", "prompt": dialogue.text, "answer": row["answer"], "extra": extra}


RENDERS = """
import asyncio
import json
import sys
from types import SimpleNamespace

import openai
from renderers.client import generate


class Renderer:
    def get_stop_token_ids(self):
        return [2]

    def parse_response(self, ids, **_):
        said = {"content": "hm", "reasoning_content": None, "reasoning_complete": True}
        return SimpleNamespace(**said, tool_calls=[])


async def main():
    client = openai.AsyncOpenAI(base_url=sys.argv[1], api_key="none")
    asked = {"messages": [], "model": "policy", "prompt_ids": [1, 5, 6]}
    told = await generate(client=client, renderer=Renderer(), **asked)
    names = ("prompt_ids", "completion_ids", "completion_logprobs", "finish_reason")
    print(json.dumps([told[name] for name in names]))


asyncio.run(main())
"""


@pytest.mark.usefixtures("folder")
def test_the_client_that_verifiers_trains_with_gets_the_ids_and_log_probs(tmp_path):
    """`renderers`, which asks vLLM for ids."""
    server = ChatServer()
    sampled = Sampled([1, 5, 6], [7, 2], [-0.5, -0.25], 0, 2)

    def answer(asked):
        assert (asked.route, asked.body["token_ids"]) == (Route.GENERATE, [1, 5, 6])
        asked.answer({"content": "hm"}, sampled)

    url = server.open(answer)
    done = subprocess.run(
        [VENV / "bin/python", "-c", RENDERS, url],
        env={"PATH": os.environ["PATH"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    server.shut(url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[1, 5, 6], [7, 2], [-0.5, -0.25], "stop"]


def test_a_stage_makes_the_rollouts_of_the_environment_that_it_is_and_replays_them(playing, folder):
    """Byte by byte those of the same game without verifiers, and again without a process."""
    plain, played = playing(), playing("verifiers", {"environment": "own:Stopped"})
    again = playing("again", {"environment": "own:Stopped", "tools": "replay"})
    seed = plain.params.seed
    for run in (plain, played, again):
        run.rewrite("data/prompts", lambda row: {"extra": json.dumps({"example": game(seed, row)})})
        for name in ("own.py", "verifiers_toys.py"):
            (run.root / "environments" / name).write_text((folder / name).read_text())
    plain.run(ROLLOUT)
    metrics = played.run(ROLLOUT)
    (again.root / "environments/own.py").write_text(MODULE.replace(str(VENV), "/nowhere"))
    made = "artifacts/tool_answers/iter_001.parquet"
    (again.root / "tool_answers/record.parquet").write_bytes((played.root / made).read_bytes())
    assert again.run(ROLLOUT) == metrics
    assert again.rows("rollouts/iter_001") == played.rows("rollouts/iter_001")
    rows, same = (run.rows("rollouts/iter_001") for run in (plain, played))
    compared = 0
    for row, other in zip(rows, same, strict=True):
        turns = len(row["turn_ends"])
        if len(other["turn_ends"]) < turns:
            continue  # verifiers ends with a turn without a word
        paid = row["environment_reward"] if row["finish_reason"] == "stop" else 0.0
        row["environment_reward"] = paid
        row["turn_rewards"] = [0.0] * (turns - 1) + [paid]
        assert other == row
        compared += turns > 1
    assert compared > len(rows) / 3


def game(run_seed, row):
    """What the seed of tests/stages/test_environments.py's Echo says, for a row of the dataset."""
    seed = stable_hash(run_seed, "environment", row["prompt_id"])
    info = {"turns": 1 + seed % 4, "name": str(seed % 100)}
    return {"example_id": 0, "prompt": [{"role": "user", "content": row["prompt"]}], "info": info}
