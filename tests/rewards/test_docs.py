"""The guide's examples do what it says: every source is loaded, and every table scored."""

import json
import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from pipelines.config.params import load_params
from stages.contracts.rewards import Http, Judge
from stages.rewards.instructions import CHECKS
from tests.rewards.conftest import row

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/rewards.md").read_text()
BLOCKS = [
    (match[1], match[2], TEXT[match.end() :])
    for match in re.finditer(r"```(\w+)\n(.*?)```\n", TEXT, re.DOTALL)
]
SOURCES = [
    (name, source, after)
    for language, body, after in BLOCKS
    if language == "yaml"
    for name, source in YAML(typ="safe").load(body)["rewards"].items()
]


def table(after: str) -> list[dict[str, str]]:
    """The table that belongs to a block: the first one before the next block or heading."""
    until = re.split(r"\n(?:```|#)", after)[0]
    lines = [line.strip() for line in until.splitlines() if line.startswith("|")]
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], each, strict=True)) for each in cells[2:]] if cells else []


def test_the_whole_of_each_example_is_valid(tmp_path) -> None:
    examples = [body for language, body, _ in BLOCKS if language == "yaml"]
    assert len(examples) > 10
    for body in examples:
        (tmp_path / "params.yaml").write_text(body)
        load_params(tmp_path)


@pytest.mark.parametrize(
    ("source", "after"),
    [
        pytest.param(source, after, id=f"{source['kind']}-{name}")
        for name, source, after in SOURCES
        if table(after)
    ],
)
def test_tables_are_what_the_source_says(score, tmp_path, source, after) -> None:
    for language, body, _ in BLOCKS:
        if language == "python":
            (tmp_path / Path(body.splitlines()[0].removeprefix("# ")).name).write_text(body)
    lines = table(after)
    rows = [
        row(
            line["response"],
            line["answer"] or None,
            index,
            **({"level": int(line["level"])} if "level" in line else {}),
        )
        for index, line in enumerate(lines)
    ]
    assert score(rows, tmp_path, **source) == [float(line["reward"]) for line in lines]


def test_every_rule_has_a_table() -> None:
    with_tables = {source["kind"] for _, source, after in SOURCES if table(after)}
    assert with_tables == {
        "maths",
        "multiple_choice",
        "pattern",
        "format",
        "json_schema",
        "instructions",
        "length",
        "repetition",
        "function",
    }


def test_the_request_of_the_guide_is_what_is_sent(score, server, monkeypatch) -> None:
    source = next(source for _, source, _ in SOURCES if source["kind"] == "http")
    sent, answered = (json.loads(body) for language, body, _ in BLOCKS if language == "json")
    monkeypatch.setenv(source["token_variable"], "a-word")
    server.answer = lambda *_: (200, {}, answered)
    rows = [
        {**row(response, answer), "prompt": prompt}
        for prompt, response, answer in zip(*sent.values(), strict=True)
    ]
    assert score(rows, **{**source, "url": server.url}) == answered["rewards"]
    assert server.requests[0][2] == sent
    Http.model_validate(source)


def test_the_judge_of_the_guide_is_asked_what_it_says(score, server) -> None:
    source = next(source for _, source, _ in SOURCES if source["kind"] == "judge")
    server.answer = lambda *_: (
        200,
        {},
        {"choices": [{"message": {"content": 'Close. {"score": 7}'}}]},
    )
    assert score([row("5")], **{**source, "url": server.url}) == [7.0]
    asked = server.requests[0][2]["messages"][0]["content"]
    assert asked.splitlines()[1:] == [
        "Expected: 4",
        "Given: 5",
        'How good is it, from 0 to 10? Answer with {"score": N}.',
    ]
    Judge.model_validate(source)


def test_every_instruction_is_listed() -> None:
    for name in CHECKS:
        group, _, instruction = name.partition(":")
        assert f"`{group}:" in TEXT
        assert instruction in TEXT
