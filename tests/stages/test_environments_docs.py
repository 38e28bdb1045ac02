"""The examples of docs/environments.md do what it says of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.contracts.params import Params
from stages.environments.calculator import Calculator
from stages.environments.environment import Environment, Observation
from stages.environments.guess import Guess
from stages.environments.loading import BUILT_IN, find
from stages.environments.python import Python
from stages.rewards.sandbox.isolation import isolation
from stages.rewards.sandbox.values import IsolationKind

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/environments.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def own_params() -> dict[str, Any]:
    [block] = (block for block in blocks("yaml") if "search:" in block)
    return dict(yaml.safe_load(block))


@pytest.fixture
def search(tmp_path: Path) -> Environment:
    source = blocks("python")[-1]
    name = re.match(r"# environments/(\w+\.py)", source)
    assert name
    (tmp_path / name[1]).write_text(source)
    asked = own_params()["rollout"]["environment"]
    return find(asked, tmp_path)()


def test_the_environment_of_the_guide_plays(search: Environment) -> None:
    search.reset({"answer": "cab"}, 0)
    assert search.step("?a") == Observation("yes", reward=-0.05)
    assert search.step(" ?x ") == Observation("no", reward=-0.05)
    assert search.step("cab") == Observation(reward=1.0, done=True)


def test_the_params_of_the_guide_are_valid() -> None:
    given = [yaml.safe_load(block) for block in blocks("yaml")]
    params = [Params.model_validate({**one, "model": {"max_length": 8192}}) for one in given]
    asked = [one.rollout.environment for one in params]
    assert asked == ["calculator", "python", own_params()["rollout"]["environment"], None]


@pytest.mark.skipif(isolation().kind is IsolationKind.NONE, reason=isolation().detail)
def test_the_tool_of_the_guide_has_other_limits(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text(blocks("python")[0])
    tool = find("tool:Tool", tmp_path)()
    tool.reset({"answer": "46"}, 0)
    try:
        observed = tool.step("```python\nprint('x' * 1500)\nlen(bytearray(600 << 20))\n```").text
        assert observed == "x" * 1500 + f"\n{600 << 20}"
    finally:
        tool.close()


def test_the_limits_that_the_guide_names_are_those_of_the_tool() -> None:
    limits, longest = Python.limits, Python.longest
    for said in (
        f"{limits.cpu_s} seconds of CPU time and {limits.wall_s} seconds for each call",
        f"{limits.memory_mb} MB of memory, {limits.processes} processes and {limits.file_mb} MB",
        f"{limits.output_kb} kB of output",
        f"at most {longest} bytes",
    ):
        assert said in " ".join(TEXT.split())


def test_what_the_guide_says_of_the_built_in_ones_is_so() -> None:
    assert {"calculator": Calculator, "guess": Guess, "python": Python} == BUILT_IN
    tool = Calculator()
    tool.reset({"answer": "46"}, 0)
    assert tool.step("calc(12+34)").text == "46"
    assert tool.step("calc(+)").text == "error"
    assert tool.step("46") == Observation(reward=1.0, done=True)
