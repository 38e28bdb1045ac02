"""The examples of docs/environments.md do what it says of them."""

import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.contracts.episodes import EpisodeParams
from stages.contracts.params import Params
from stages.data.offered_tools import tools_hash
from stages.data.tools_file import read_tools
from stages.environments import list_tools, write_prompts
from stages.environments.asking import Asking
from stages.environments.calculator import Calculator
from stages.environments.environment import Environment, Observation
from stages.environments.guess import Guess
from stages.environments.loading import BUILT_IN, find
from stages.environments.python import Python
from stages.rewards.sandbox.isolation import isolation
from stages.rewards.sandbox.values import IsolationKind
from tests.ports import free_port
from tests.waiting import answers, until

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/environments.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def write_files(folder: Path) -> None:
    """The examples, in the files that they name."""
    for source in blocks("python"):
        name = re.match(r"# environments/(\w+\.py)", source)
        assert name
        (folder / name[1]).write_text(source)


def own_params() -> dict[str, Any]:
    [block] = (block for block in blocks("yaml") if "search:" in block)
    return dict(yaml.safe_load(block))


@pytest.fixture
def search(tmp_path: Path) -> Environment:
    write_files(tmp_path)
    asked = own_params()["rollout"]["environment"]
    return find(asked, tmp_path)()


def test_the_environment_of_the_guide_plays(search: Environment) -> None:
    search.reset({"answer": "cab"}, 0)
    assert search.step("?a") == Observation("yes", reward=-0.05)
    assert search.step(" ?x ") == Observation("no", reward=-0.05)
    assert search.step("cab") == Observation(reward=1.0, done=True)


def test_the_params_of_the_guide_are_valid() -> None:
    """Each block, over what the first one says."""
    first, *others = (yaml.safe_load(block) for block in blocks("yaml"))
    for other in ({}, *others):
        over = {name: first.get(name, {}) | values for name, values in other.items()}
        params = Params.model_validate({**first, **over, "model": {"max_length": 8192}})
        module, colon, _ = str(params.rollout.environment).partition(":")
        assert f"# environments/{module}.py" in TEXT if colon else module in BUILT_IN


def commands(module: str) -> list[list[str]]:
    """The words after a command of the guide."""
    return [
        line.split()[3:] for line in TEXT.splitlines() if line.startswith(f"python -m {module} ")
    ]


def test_the_tools_of_the_guide_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "environments").mkdir()
    (tmp_path / "data").mkdir()
    write_files(tmp_path / "environments")
    monkeypatch.chdir(tmp_path)
    [words] = commands("stages.environments.list_tools")
    assert list_tools.main(words) == 0
    tools = read_tools("cities.tools.json", tmp_path / "data")
    row = {"prompt_id": "p", "prompt": "", "answer": "Tiber", "extra": {"tools": tools_hash(tools)}}
    with closing(Asking(EpisodeParams(), words[0], tmp_path / "environments")) as asking:
        seats = [asking.seat(row, 0)]
        assert asking.begin(seats).result() == [Observation()]
        call = re.findall(r"`(<tool_call>.*</tool_call>)`", TEXT)[0]
        assert asking.step(seats, [call]).result() == [Observation("Tiber")]
        [wrong] = asking.step(seats, [call.replace("Rome", "Bonn")]).result()
        assert wrong.text.startswith("error:")
        answer = asking.step(seats, ["The Tiber."]).result()
        assert answer == [Observation(reward=1.0, done=True)]
        asking.leave(seats)


def test_the_cards_of_the_guide_are_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "environments").mkdir()
    (tmp_path / "data").mkdir()
    write_files(tmp_path / "environments")
    monkeypatch.chdir(tmp_path)
    words, *_ = commands("stages.environments.write_prompts")
    assert write_prompts.main(words) == 0
    rows = [json.loads(line) for line in Path("data/prompts.jsonl").read_text().splitlines()]
    # As many as the guide's prepare.held_out needs.
    assert len(rows) >= 2 * 64
    cards = find(words[0], tmp_path / "environments")()
    cards.reset({"prompt": rows[0]["prompt"], "extra": {"seed": rows[0]["seed"]}}, 0)
    assert cards.step("Hm.").reward == -0.1
    last = cards.step("0")
    assert last.done
    assert last.reward in (-1.0, 0.0, 1.0, 1.5)


def test_the_words_of_the_guide_are_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "environments").mkdir()
    (tmp_path / "data").mkdir()
    write_files(tmp_path / "environments")
    port = free_port()
    for name in ("word_server.py", "words.py"):
        file = tmp_path / "environments" / name
        file.write_text(file.read_text().replace("8000", str(port)))
    monkeypatch.chdir(tmp_path)
    server = subprocess.Popen([sys.executable, "environments/word_server.py"])
    try:
        until(
            lambda: answers(f"http://127.0.0.1:{port}/health"), "the server is up", at_work=server
        )
        _, words, _ = commands("stages.environments.write_prompts")
        assert write_prompts.main([*words[:-1], "8"]) == 0
        rows = [json.loads(line) for line in Path("data/prompts.jsonl").read_text().splitlines()]
        prompt = "Guess the city.\n\nA city of 5 letters, game 5."
        assert rows[5] == {"prompt": prompt, "seed": 5}
        with closing(find(words[0], tmp_path / "environments")()) as game:
            game.reset({"prompt": prompt, "extra": {"seed": 5}}, 0)
            assert game.step("Rome") == Observation("It begins with P.")
            assert game.step("Paris") == Observation("yes", reward=1.0, done=True)
    finally:
        server.kill()
        server.wait()


def test_the_agent_of_the_guide_asks_twice(tmp_path: Path) -> None:
    write_files(tmp_path)
    row = {"prompt_id": "p", "prompt": "1+2=", "answer": "3", "extra": {}}
    with closing(Asking(EpisodeParams(), "solver:Solver", tmp_path)) as asking:
        seats = [asking.seat(row, 0)]
        assert asking.begin(seats).result() == [Observation()]
        again = asking.step(seats, ["4"]).result()
        assert again == [Observation("Is that right? Say the answer again.")]
        assert asking.step(seats, [" 3"]).result() == [Observation(reward=1.0, done=True)]
        asking.leave(seats)


@pytest.mark.slow
def test_the_environment_of_verifiers_of_the_guide_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "environments").mkdir()
    (tmp_path / "data").mkdir()
    write_files(tmp_path / "environments")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/hub").symlink_to(Path(sys.prefix) / "verifiers")
    monkeypatch.chdir(tmp_path)
    _, _, words = commands("stages.environments.write_prompts")
    assert write_prompts.main([*words[:-1], "8"]) == 0
    rows = [json.loads(line) for line in Path("data/prompts.jsonl").read_text().splitlines()]
    asked = rows[5]
    assert asked["prompt"] == [{"role": "user", "content": "What is 0 + 5?"}]
    extra = {"example": asked["example"], "tools": tools_hash(asked["tools"])}
    row = {"prompt_id": "p", "prompt": "user: What is 0 + 5?", "answer": "5", "extra": extra}
    with closing(Asking(EpisodeParams(answer_timeout=600), words[0], Path("environments"))) as ask:
        seats = [ask.seat(row, 0)]
        assert ask.begin(seats).result() == [Observation()]
        call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 5}}</tool_call>'
        assert ask.step(seats, [call]).result() == [Observation("7")]
        said = "As the tool says, and I can add, too, it is: 5"
        assert ask.step(seats, [said]).result() == [Observation(reward=0.0, done=True)]
        ask.leave(seats)


@pytest.mark.skipif(isolation().kind is IsolationKind.NONE, reason=isolation().detail)
def test_the_tool_of_the_guide_has_other_limits(tmp_path: Path) -> None:
    write_files(tmp_path)
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
