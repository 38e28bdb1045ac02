"""Environments of Gymnasium in text: actions, observations, and prompts with the first of them."""

import json
from contextlib import closing

import gymnasium
import pytest

from stages.contracts.episodes import EpisodeParams
from stages.environments import write_prompts
from stages.environments.asking import Asking
from stages.environments.environment import NoAnswer, Observation
from stages.environments.loading import find

GAMES = """
import gymnasium
from gymnasium.spaces import Text

from stages.environments.gymnasium_text import GymnasiumText


class Cards(GymnasiumText):
    id = "Blackjack-v1"
    instructions = "1: another card, 0: enough."
    invalid_reward = -0.5

    def show(self, observation):
        own, dealer, ace = observation
        return f"You have {own}, the dealer {dealer}."


class Lake(GymnasiumText):
    id = "FrozenLake-v1"
    settings = {"is_slippery": False}
    in_prompt = False

    def parse(self, turn):
        try:
            return ["left", "down", "right", "up"].index(turn)
        except ValueError:
            raise ValueError("say left, down, right or up") from None


class Cart(GymnasiumText):
    id = "CartPole-v1"
    settings = {"max_episode_steps": 2}


class Echo(gymnasium.Env):
    action_space = observation_space = Text(20)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return f"game {seed}", {}

    def step(self, action):
        return action * 2, len(action), action == "end", False, {}


gymnasium.register("Echo-v0", lambda: Echo())


class Words(GymnasiumText):
    id = "Echo-v0"


class Pendulum(GymnasiumText):
    id = "Pendulum-v1"
    in_prompt = False


class Unknown(GymnasiumText):
    id = "NoSuchGame-v0"
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "games.py").write_text(GAMES)
    return tmp_path


def row(prompt="", **extra):
    return {"prompt_id": "p", "prompt": prompt, "answer": None, "extra": extra}


def begun(folder, name, **given):
    environment = find(f"games:{name}", folder)()
    environment.reset(row(**given), 0)
    return environment


def write(folder, name, number, *more):
    file = folder / "prompts.jsonl"
    words = [f"games:{name}", str(file), "--number", str(number), "--environments", str(folder)]
    status = write_prompts.main([*words, *more])
    return status, [json.loads(line) for line in file.read_text().splitlines()]


def test_an_episode_is_what_gymnasium_plays_with_the_same_seed_and_actions(folder):
    _, rows = write(folder, "Cards", 40)
    lengths = set()
    for each in rows:
        game = gymnasium.make("Blackjack-v1")
        (own, dealer, _), _ = game.reset(seed=each["seed"])
        said = f"1: another card, 0: enough.\n\nYou have {own}, the dealer {dealer}."
        assert each["prompt"] == said
        played = begun(folder, "Cards", prompt=said, seed=each["seed"])
        for turn in range(20):
            (own, dealer, _), reward, ended, _, _ = game.step(int(turn < 2))
            expected = Observation(f"You have {own}, the dealer {dealer}.", reward, ended)
            assert played.step("<think>1 or 0?</think>" + ("1" if turn < 2 else "0")) == expected
            if ended:
                lengths.add(turn)
                break
        played.close()
    assert lengths == {0, 1, 2}


def test_a_walk_over_the_lake_is_paid_at_its_end(folder):
    lake = begun(folder, "Lake")
    walk = ["down", "down", "right", "right", "down"]
    assert [lake.step(where).text for where in walk] == ["4", "8", "9", "10", "14"]
    assert lake.step("right") == Observation("15", reward=1.0, done=True)


def test_what_is_no_action_is_told_and_does_not_move_the_game(folder):
    lake = begun(folder, "Lake")
    assert lake.step("jump") == Observation("error: say left, down, right or up")
    assert lake.step("down").text == "4"
    game = begun(folder, "Cards", prompt="You have 13, the dealer 10.", seed=start_of_13(folder))
    assert game.step("more") == Observation("error: say the number of an action", reward=-0.5)
    assert game.step("-1").text == "error: an action is one of Discrete(2)"


def start_of_13(folder):
    _, rows = write(folder, "Cards", 400)
    return next(r["seed"] for r in rows if "You have 13, the dealer 10." in r["prompt"])


def test_numbers_of_arrays_are_written_as_json_and_a_time_limit_ends_the_episode(folder):
    _, [first, *_] = write(folder, "Cart", 2)
    cart = begun(folder, "Cart", prompt=first["prompt"], seed=first["seed"])
    numbers = json.loads(cart.step("1").text)
    assert len(numbers) == 4
    assert numbers != json.loads(first["prompt"])
    assert cart.step("0").done


def test_a_text_space_takes_the_turn_and_gives_its_text(folder):
    words = begun(folder, "Words", prompt="This is game 7.", seed=7)
    assert words.step(" ab \n") == Observation("abab", reward=2.0)
    assert words.step("end") == Observation("endend", reward=3.0, done=True)


def test_a_prompt_without_its_first_observation_is_refused(folder):
    with pytest.raises(NoAnswer, match="write the prompts with"):
        begun(folder, "Words", prompt="This is game 8.", seed=7)
    for seed in (-1, "7", True):
        with pytest.raises(NoAnswer, match="write a whole number from 0 on"):
            begun(folder, "Words", prompt="game", seed=seed)


def test_prompts_are_written_once_each_and_alike(folder, capsys):
    status, rows = write(folder, "Cards", 600)
    assert status == 0
    assert len({each["prompt"] for each in rows}) == len(rows) < 600
    assert f"{len(rows)} different prompts of 600 seeds" in capsys.readouterr().out
    assert write(folder, "Cards", 600)[1] == rows
    _, others = write(folder, "Words", 3, "--first-seed", "50")
    assert [each["prompt"] for each in others] == ["game 50", "game 51", "game 52"]


@pytest.mark.parametrize("processes", [0, 2])
def test_episodes_of_a_seed_are_the_same_side_by_side(folder, processes):
    params = EpisodeParams(processes=processes)
    with closing(Asking(params, "games:Cards", folder)) as asking:
        _, rows = write(folder, "Cards", 30)
        seats = [asking.seat(row(prompt=r["prompt"], seed=r["seed"]), 0) for r in rows * 2]
        assert asking.begin(seats).result() == [Observation()] * len(seats)
        answers = asking.step(seats, ["1"] * len(seats)).result()
        assert answers[: len(rows)] == answers[len(rows) :]
        assert len({answer.text for answer in answers}) > 5
        asking.leave(seats)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("Unknown", "NoSuchGame"), ("Pendulum", "say in `parse` how a turn is an action of Box")],
)
def test_a_game_that_cannot_be_played_says_why(folder, name, problem):
    with closing(Asking(EpisodeParams(), f"games:{name}", folder)) as asking:
        seats = [asking.seat(row(), 0)]
        [answer] = asking.begin(seats).result()
        if answer == Observation():
            [answer] = asking.step(seats, ["1"]).result()
    assert isinstance(answer, NoAnswer)
    assert problem in str(answer)
