"""The examples of docs/environments.md do what it says of them."""

import re
from pathlib import Path

import pytest
import yaml

from stages.contracts.params import Params
from stages.environments.calculator import Calculator
from stages.environments.environment import Environment, Observation
from stages.environments.guess import Guess
from stages.environments.loading import BUILT_IN, find

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/environments.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def search(tmp_path: Path) -> Environment:
    (source,) = blocks("python")
    name = re.match(r"# environments/(\w+\.py)", source)
    assert name
    (tmp_path / name[1]).write_text(source)
    asked = yaml.safe_load(blocks("yaml")[1])["rollout"]["environment"]
    return find(asked, tmp_path)()


def test_the_environment_of_the_guide_plays(search: Environment) -> None:
    search.reset({"answer": "cab"}, 0)
    assert search.step("?a") == Observation("yes", reward=-0.05)
    assert search.step(" ?x ") == Observation("no", reward=-0.05)
    assert search.step("cab") == Observation(reward=1.0, done=True)


def test_the_params_of_the_guide_are_valid() -> None:
    first, own, *others = (yaml.safe_load(block) for block in blocks("yaml"))
    model = {"max_length": 512}
    params = Params.model_validate({**first, "model": model})
    assert params.rollout.environment in BUILT_IN
    Params.model_validate({**own, "model": {"max_length": 1024}})
    for other in others:
        Params.model_validate(other)


def test_what_the_guide_says_of_the_two_is_so() -> None:
    assert {"calculator": Calculator, "guess": Guess} == BUILT_IN
    tool = Calculator()
    tool.reset({"answer": "46"}, 0)
    assert tool.step("calc(12+34)").text == "46"
    assert tool.step("calc(+)").text == "error"
    assert tool.step("46") == Observation(reward=1.0, done=True)
