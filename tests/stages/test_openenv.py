"""Environments behind a real server of OpenEnv: sessions, hooks and failures."""

import json
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import psutil
import pytest

from stages.contracts.episodes import EpisodeParams
from stages.environments import write_prompts
from stages.environments.asking import Asking
from stages.environments.environment import NoAnswer, Observation
from tests import waiting
from tests.ports import free_port
from tests.stages.openenv_server import WORDS

SERVER = Path(__file__).with_name("openenv_server.py")
MODULE = """
from stages.environments.openenv import OpenEnv


class Words(OpenEnv):
    url = "http://127.0.0.1:{port}"
    instructions = "Say a letter, or the word."
    invalid_reward = -0.5
    in_prompt = {in_prompt}

    def parse(self, turn):
        if not turn.isalpha():
            raise ValueError("say letters alone")
        return super().parse(turn)


class Other(Words):
    action_field = "word"


class Gone(OpenEnv):
    url = "http://127.0.0.1:9/${{TESTS_TOKEN}}"
    in_prompt = False
"""


@contextmanager
def serving(port, sessions):
    process = subprocess.Popen([sys.executable, SERVER, str(port), str(sessions)])
    try:
        waiting.until(lambda: listens(port), "the OpenEnv server listens", at_work=process)
        yield process
    finally:
        process.kill()
        process.wait()


def listens(port):
    return any(each.laddr.port == port for each in psutil.net_connections("tcp") if not each.raddr)


@pytest.fixture(scope="module")
def port():
    number = free_port()
    with serving(number, 100):
        yield number


class Episodes:
    """Some that begin together, one for each seed."""

    def __init__(self, folder, port, seeds, name="Words", **params):
        (folder / "own.py").write_text(MODULE.format(port=port, in_prompt=False))
        self.asking = Asking(EpisodeParams(**params), f"own:{name}", folder)
        row = {"prompt_id": "p", "prompt": "", "answer": None}
        self.seats = [self.asking.seat({**row, "extra": {"seed": seed}}, 0) for seed in seeds]

    def __enter__(self):
        self.begun = self.asking.begin(self.seats).result()
        return self

    def __exit__(self, *_):
        self.asking.leave(self.seats)
        self.asking.close()

    def say(self, *actions):
        return self.asking.step(self.seats, actions).result()


@pytest.mark.parametrize("processes", [0, 2])
def test_each_episode_has_a_session_and_its_word(port, tmp_path, processes):
    seeds = [*range(20), *range(20)]
    words = [Random(seed).choice(WORDS) for seed in seeds]
    assert {*words} == {*WORDS}
    with Episodes(tmp_path, port, seeds, processes=processes) as episodes:
        assert episodes.begun == [Observation()] * 40
        said = [word[0] for word in words]
        shown = ["".join(c if c == word[0] else "_" for c in word) for word in words]
        assert episodes.say(*said) == [Observation(text) for text in shown]
        wrong = Observation("error: say letters alone", reward=-0.5)
        assert episodes.say(*["<!>"] * 40) == [wrong] * 40
        won = [Observation(word, reward=1.0, done=True) for word in words]
        assert episodes.say(*words) == won


def test_sessions_end_with_their_episodes(tmp_path):
    port = free_port()
    with serving(port, 2):
        for _ in range(3):
            with Episodes(tmp_path, port, [1, 2]) as episodes:
                assert episodes.begun == [Observation()] * 2
        with Episodes(tmp_path, port, [1, 2, 3]) as episodes:
            [full] = [str(answer) for answer in episodes.begun if isinstance(answer, NoAnswer)]
            assert f"OpenEnv server http://127.0.0.1:{port}: " in full
            assert "give it a max_concurrent_envs" in full


def test_prompts_have_the_first_observation(port, tmp_path):
    (tmp_path / "own.py").write_text(MODULE.format(port=port, in_prompt=True))
    file = tmp_path / "prompts.jsonl"
    words = ["own:Words", str(file), "--number", "3", "--environments", str(tmp_path)]
    assert write_prompts.main(words) == 0
    [row] = [json.loads(line) for line in file.read_text().splitlines()]
    assert row == {"prompt": "Say a letter, or the word.\n\n_____", "seed": 0}
    with closing(Asking(EpisodeParams(), "own:Words", tmp_path)) as asking:
        shared = {"prompt_id": "p", "answer": None, "extra": {"seed": 0}}
        prompts = [row["prompt"], "Say a letter."]
        seats = [asking.seat({**shared, "prompt": prompt}, 0) for prompt in prompts]
        fine, lacking = asking.begin(seats).result()
        assert fine == Observation()
        assert "write the prompts with" in str(lacking)
        asking.leave(seats)


def test_a_failure_of_the_environment_is_its_episodes_alone(port, tmp_path):
    with Episodes(tmp_path, port, [1, 1, 1]) as episodes:
        assert episodes.begun == [Observation()] * 3
        episodes.asking._params = EpisodeParams(answer_timeout=10)
        crashed, late, fine = episodes.say("crash", "hang", "z")
        assert f"OpenEnv server http://127.0.0.1:{port}: " in str(crashed)
        assert "no more words" in str(crashed)
        assert "no answer within episodes.answer_timeout 10 seconds" in str(late)
        assert fine == Observation("_____")


def test_an_action_that_the_server_does_not_have_is_explained(port, tmp_path):
    with Episodes(tmp_path, port, [1], name="Other") as episodes:
        [answer] = episodes.say("a")
    assert isinstance(answer, NoAnswer)
    assert "look at the fields that `parse` returns" in str(answer)


def test_a_server_that_dies_is_named_and_found_again(tmp_path):
    port = free_port()
    with serving(port, 9) as process, Episodes(tmp_path, port, [1]) as episodes:
        assert episodes.say("z") == [Observation("_____")]
        process.kill()
        process.wait()
        [gone] = episodes.say("z")
        assert f"OpenEnv server http://127.0.0.1:{port}: " in str(gone)
        with serving(port, 9):
            assert episodes.say("z") == [Observation("_____")]


def test_a_server_that_is_not_there_is_named_without_what_is_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("TESTS_TOKEN", "a-secret-of-the-tests")
    with Episodes(tmp_path, 9, [1], name="Gone") as episodes:
        problem = str(episodes.begun[0])
    assert "OpenEnv server http://127.0.0.1:9/${TESTS_TOKEN}: ConnectionError" in problem
    assert "a-secret" not in problem
    monkeypatch.delenv("TESTS_TOKEN")
    with Episodes(tmp_path, 9, [1], name="Gone") as episodes:
        assert "TESTS_TOKEN is not set" in str(episodes.begun[0])
