"""Data that people use, where they lie beside the repository; they are never part of it."""

import json
from pathlib import Path

import pytest

from stages.context import StageError
from stages.data.formats.messages import messages_of

SHARED = Path(__file__).resolve().parents[3] / "shared/data"
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")


def prepare(prepared, files, **params):
    """A run on the first rows of these files; a character is a token, so they are cut."""
    given = {}
    for name in {source["path"] for sources in files.values() for source in sources}:
        with (SHARED / name).open(encoding="utf-8") as file:
            given[name] = "".join(line for line, _ in zip(file, range(400), strict=False))
    return prepared(given, files=files, **params)


def test_school_maths_with_its_final_answers(prepared):
    columns = {"question": "prompt", "final": "answer", "answer": "solution"}
    shown = {"question": "prompt", "answer": "completion", "final": "answer"}
    run = prepare(
        prepared,
        {
            "prompts": [{"path": "gsm8k_train.jsonl", "columns": columns}],
            "held_out": [{"path": "gsm8k_test.jsonl", "columns": columns}],
            "demonstrations": [{"path": "gsm8k_train.jsonl", "columns": shown}],
        },
        model={"max_length": 1200},
    )
    assert run.metrics["num_prompts"] == 400 - run.metrics.get("num_dropped_prompts_too_long", 0)
    assert all(row["answer"].lstrip("-").isdigit() for row in run.rows("held_out"))
    solution = json.loads(run.rows("prompts")[0]["extra"])["solution"]
    assert "####" in solution


def test_harmless_talk_is_a_dialogue_and_not_one_question(prepared):
    run = prepare(
        prepared,
        {"preferences": [{"path": "preference_hh_harmless.jsonl", "format": "preference"}]},
        held_out=20,
        bad_rows="drop",
        model={"max_length": 1500},
    )
    rows = run.rows("preferences")
    assert len(rows) > 200
    assert not any(row["prompt"].startswith("Human:") for row in rows)
    for line in (SHARED / "preference_hh_harmless.jsonl").open(encoding="utf-8"):
        row = json.loads(line)
        assert messages_of(row["prompt"], "prompt", "user") == row["messages"]
    [(read, kept, _, dropped), *_] = [
        counts for (role, _), counts in run.report().items() if role == "preferences"
    ]
    assert read == kept + sum(dropped.values()) == 400


def test_pairs_with_two_names_for_the_prompt_need_their_format_said(prepared):
    sources = [{"path": "preference.jsonl"}]
    with pytest.raises(StageError, match="may be messages_preference or preference"):
        prepare(prepared, {"preferences": sources}, held_out=20)
    run = prepare(
        prepared,
        {"preferences": [{**sources[0], "format": "preference"}]},
        name="said",
        held_out=20,
        model={"max_length": 2500},
    )
    assert run.metrics["num_held_out_preferences"] >= 20


def test_instructions_tests_of_code_and_constraints_keep_their_columns(prepared):
    run = prepare(
        prepared,
        {
            "demonstrations": [{"path": "instruction.jsonl"}],
            "prompts": [{"path": "humaneval.jsonl"}, {"path": "ifeval.jsonl"}],
        },
        held_out=10,
        model={"max_length": 1500},
    )
    assert run.metrics["num_demonstrations"] > 200
    extra = [json.loads(row["extra"]) for row in run.rows("prompts")]
    assert sum("entry_point" in columns for columns in extra) > 100
    assert sum("instruction_id_list" in columns for columns in extra) > 200
