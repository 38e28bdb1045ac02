"""The tools that prepare writes into prompts, and what tells an environment which they were."""

import json

import pytest

from stages.context import StageError
from stages.data.dialogue import Dialogue, asked, reply
from stages.data.folder import entries
from stages.data.items import Demonstration, Example
from stages.data.offered_tools import tools_hash
from stages.data.rendering import render
from stages.data.tokenizer import Renderer
from stages.data.tools_file import read_tools
from tests.data.test_rendering import PLACE, TOKENIZER, text_of

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}
    for name in ("add", "search")
]
OWN = ({"type": "function", "function": {"name": "fly", "description": "", "parameters": {}}},)


def rendered(item, tools):
    [(_, row)] = render([item], Renderer(TOKENIZER, tools), 2000)
    return row.values


def test_the_tools_are_in_every_prompt_that_has_none_of_its_own():
    items = [
        Example(place=PLACE, prompt=asked("1+1?")),
        Example(place=PLACE, prompt=Dialogue(({"role": "user", "content": "Up?"},), OWN)),
    ]
    (_, plain), (_, own) = render(items, Renderer(TOKENIZER, TOOLS), 2000)
    text = text_of(plain.values["prompt_ids"])
    assert '"add"' in text
    assert '"search"' in text
    assert "fly" not in text
    assert json.loads(plain.values["extra"]) == {"tools": tools_hash(TOOLS)}
    text = text_of(own.values["prompt_ids"])
    assert '"fly"' in text
    assert "search" not in text
    assert json.loads(own.values["extra"]) == {"tools": tools_hash(OWN)}


def test_a_prompt_stays_the_same_prompt_whatever_tools_it_offers():
    item = Example(place=PLACE, prompt=asked("1+1?"), extra={"level": 1})
    without, offered = rendered(item, ()), rendered(item, TOOLS)
    assert json.loads(without["extra"]) == {"level": 1}
    for name in ("prompt_id", "prompt", "row_id"):
        assert without[name] == offered[name]


def test_a_demonstration_is_taught_after_the_same_prompt():
    question = rendered(Example(place=PLACE, prompt=asked("1+1?")), TOOLS)
    shown = Demonstration(place=PLACE, prompt=asked("1+1?"), completion=(reply("2"),))
    turns = (reply("add"), {"role": "tool", "content": "2"}, reply("2"))
    several = Demonstration(place=PLACE, prompt=asked("1+1?"), completion=turns)
    for item in (shown, several):
        assert rendered(item, TOOLS)["prompt_ids"] == question["prompt_ids"]


def test_the_file_lies_beside_the_data(tmp_path):
    (tmp_path / "own.tools.json").write_text(json.dumps(TOOLS))
    (tmp_path / "prompts.csv").write_text("prompt\n1+1?\n")
    assert entries(tmp_path) == [tmp_path / "prompts.csv"]
    assert [*read_tools("own.tools.json", tmp_path)] == TOOLS
    assert not read_tools(None, tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "is no file: write it with `python -m stages.environments.list_tools`"),
        ("[{", "is no list of tools in JSON"),
        ('"add"', "is no list of tools in JSON"),
        ("[]", "has no tool"),
    ],
)
def test_what_is_no_file_of_tools_is_refused(text, problem, tmp_path):
    if text is not None:
        (tmp_path / "own.tools.json").write_text(text)
    with pytest.raises(StageError, match=problem):
        read_tools("own.tools.json", tmp_path)


def test_what_is_null_in_a_tool_is_as_good_as_left_out(tmp_path):
    """A server says that an optional argument is null by default; the data have no such thing."""
    argument = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
    function = {"name": "find", "description": "", "parameters": {"properties": {"in": argument}}}
    listed = [{"type": "function", "function": function}]
    (tmp_path / "find.tools.json").write_text(json.dumps(listed))
    read = read_tools("find.tools.json", tmp_path)
    offered = rendered(Example(place=PLACE, prompt=asked("1+1?")), read)
    assert json.loads(offered["extra"]) == {"tools": tools_hash(listed)}
    assert tools_hash(listed) != tools_hash(TOOLS)
