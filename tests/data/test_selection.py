"""Which rows are used: held out, duplicates, weights, lengths. Nothing is dropped uncounted."""

import json
import random

import pytest

from stages.context import StageError

PROMPTS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(40)]
PAIRS = [{"prompt": f"question {i}", "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(40)]
SHOWN = [{"prompt": f"question {i}", "completion": f"a{i}"} for i in range(40)]


def prompts(run, role):
    return {row["prompt"] for row in run.rows(role)}


def test_prompts_are_split_off_by_their_hash_whatever_the_order_of_the_rows(prepared):
    files = {"prompts.jsonl": PROMPTS, "preferences.jsonl": PAIRS, "demonstrations.jsonl": SHOWN}
    run = prepared(files, held_out=10)
    held_out = prompts(run, "held_out")
    assert len(held_out) == 10
    assert prompts(run, "held_out_preferences") == held_out
    for role in ("prompts", "preferences", "demonstrations", "feedback"):
        assert len(prompts(run, role)) == 30
        assert not prompts(run, role) & held_out
    assert run.report()["demonstrations", "demonstrations.jsonl"] == (40, 30, 30, {"held_out": 10})
    assert run.metrics["num_dropped_prompts_held_out"] == 10
    assert {row["answer"] for row in run.rows("held_out")} == {p.split()[1] for p in held_out}

    shuffled = random.Random(0).sample(PROMPTS, 40)
    other = prepared({**files, "prompts.jsonl": shuffled}, "shuffled", held_out=10)
    assert prompts(other, "held_out") == held_out
    path = "artifacts/data/prompts.parquet"
    ids = [row["prompt_id"] for row in run.rows("prompts")]
    assert ids == sorted(ids)
    assert [row["prompt_id"] for row in other.rows("prompts")] == ids, path


def test_nothing_is_split_off_where_zero_is_asked_for_or_a_source_is_given(prepared):
    assert prepared({"prompts.jsonl": PROMPTS}, held_out=0).metrics["num_held_out"] == 0
    given = prepared({"prompts.jsonl": PROMPTS[1:], "held_out.jsonl": PROMPTS[:1]}, "given")
    assert prompts(given, "held_out") == {"question 0"}
    assert given.metrics["num_prompts"] == 39


def test_more_held_out_than_there_are_is_refused(prepared):
    with pytest.raises(StageError, match=r"held_out 21 .* prompts, which have only 40 different"):
        prepared({"prompts.jsonl": PROMPTS}, held_out=21)


HELD_OUT = [{"prompt": "Question  3!", "answer": "3"}]


def test_a_training_prompt_that_is_held_out_is_dropped_and_counted_or_refused(prepared):
    files = {"prompts.jsonl": PROMPTS, "demonstrations.jsonl": SHOWN, "held_out.jsonl": HELD_OUT}
    run = prepared(files)
    assert run.report()["prompts", "prompts.jsonl"] == (40, 39, 39, {"contaminated": 1})
    assert run.metrics["num_dropped_demonstrations_contaminated"] == 1
    assert "question 3" not in prompts(run, "prompts") | prompts(run, "demonstrations")
    message = r"held_out\.jsonl line 1 holds out the prompt of demonstrations\.jsonl line 4"
    with pytest.raises(StageError, match=message):
        prepared(files, "refused", contamination="refuse")


def test_a_held_out_prompt_is_found_in_another_encoding(prepared):
    hidden = ["Cafe\u0301 3", "\uff43\uff41\uff46\u00e9 3", "Ca\u200bf\u00e9 3"]
    rows = [{"prompt": text} for text in ["Th\u00e9 3", *hidden]]
    run = prepared({"prompts.jsonl": rows, "held_out.jsonl": [{"prompt": "Caf\u00e9 3"}]})
    assert run.report()["prompts", "prompts.jsonl"] == (4, 1, 1, {"contaminated": 3})


def chat(number):
    asked, said = ("user", f"ask {number}"), ("assistant", f"say {number}")
    more, then = ("user", f"and {number}?"), ("assistant", f"yes {number}")
    return [{"role": role, "content": text} for role, text in (asked, said, more, then)]


def test_a_later_turn_of_a_dialogue_is_not_learnt_where_its_prompt_is_held_out(prepared):
    """Split off the same dialogues, where the last turn is what is asked; and given by itself."""
    chats = [{"messages": chat(number)} for number in range(20)]
    files = {"demonstrations": "chats.jsonl", "prompts": "chats.jsonl"}
    run = prepared({"chats.jsonl": chats}, files=files, held_out=5)
    assert len(run.rows("held_out")) == 5
    assert run.report()["demonstrations", "chats.jsonl"] == (20, 15, 15, {"held_out": 5})
    learnt = {row["prompt"].split()[-1] for row in run.rows("demonstrations")}
    asked = {row["prompt"].split()[-1].rstrip("?") for row in run.rows("held_out")}
    assert len(asked) == 5
    assert not learnt & asked

    for cut, dropped in ((3, 1), (1, 1), (2, 0)):
        held_out = [{"messages": [*chat(7)[:cut], *([] if cut != 2 else chat(8)[2:3])]}]
        sources = {"demonstrations.jsonl": chats, "held_out.jsonl": held_out}
        found = prepared(sources, f"cut-{cut}").metrics
        assert found.get("num_dropped_demonstrations_contaminated", 0) == dropped
    last = prepared(
        {**sources, "held_out.jsonl": [{"messages": chat(7)[:1]}]}, "last", turns="last"
    )
    assert last.metrics.get("num_dropped_demonstrations_contaminated", 0) == 0  # seen, not learnt

    message = r"held_out\.jsonl line 1 holds out the prompt of demonstrations\.jsonl line 8"
    sources["held_out.jsonl"] = [{"messages": chat(7)[:3]}]
    with pytest.raises(StageError, match=message):
        prepared(sources, "refused", contamination="refuse")


def test_a_system_message_does_not_hide_a_held_out_prompt(prepared):
    files = {
        "prompts.jsonl": [*PROMPTS, {"prompt": "question 50", "system": "Be brief."}],
        "held_out.jsonl": [{"prompt": "question 50", "answer": "50"}],
    }
    assert prepared(files).metrics["num_dropped_prompts_contaminated"] == 1


@pytest.mark.parametrize(("duplicates", "kept"), [("keep", 4), ("exact", 3), ("normalised", 2)])
def test_duplicates_are_dropped_as_asked_and_counted(prepared, duplicates, kept):
    rows = [
        {"prompt": "a b", "completion": "c"},
        {"prompt": "a b", "completion": "c", "task": "x"},
        {"prompt": "A  b?", "completion": "C."},
        {"prompt": "a b", "completion": "d"},
    ]
    run = prepared({"demonstrations.jsonl": rows}, duplicates=duplicates)
    dropped = {"duplicate": 4 - kept} if kept < 4 else {}
    assert run.report()["demonstrations", "demonstrations.jsonl"] == (4, kept, kept, dropped)
    lines = {"keep": [1, 2, 3, 4], "exact": [1, 3, 4], "normalised": [1, 4]}[duplicates]
    assert [row["line"] for row in run.rows("demonstrations")] == lines


def test_the_same_response_with_another_rating_is_another_row(prepared):
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False, True)]
    run = prepared({"feedback.jsonl": rows})
    assert [row["rating"] for row in run.rows("feedback")] == [1.0, 0.0]


def test_a_prompt_is_there_once_even_where_duplicates_are_kept(prepared):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}, {"prompt": "b"}]
    run = prepared({"prompts.jsonl": rows}, duplicates="keep", held_out=0)
    assert {row["prompt"]: row["answer"] for row in run.rows("prompts")} == {"a": "1", "b": None}
    assert run.metrics["num_dropped_prompts_duplicate"] == 1


def test_weights_take_whole_passes_and_a_share_drawn_by_the_seed(prepared):
    files = {"twice.jsonl": SHOWN[:20], "some.jsonl": SHOWN[20:]}
    sources = [{"path": "twice.jsonl", "weight": 2.25}, {"path": "some.jsonl", "weight": 0.5}]
    run = prepared(files, files={"demonstrations": sources})
    read, kept, written, dropped = run.report()["demonstrations", "twice.jsonl"]
    assert (read, kept, dropped) == (20, 20, {})
    assert 40 < written < 55
    read, kept, written, dropped = run.report()["demonstrations", "some.jsonl"]
    assert kept == written == 20 - dropped["not_drawn"]
    assert 4 < kept < 16
    counts = [row["prompt"] for row in run.rows("demonstrations")]
    assert {counts.count(row["prompt"]) for row in SHOWN[:20]} == {2, 3}
    again = prepared(files, "again", files={"demonstrations": sources})
    assert again.rows("demonstrations") == run.rows("demonstrations")
    path = "artifacts/data/demonstrations.parquet"
    assert (again.root / path).read_bytes() == (run.root / path).read_bytes()


def test_a_row_that_was_not_drawn_leaves_its_place_to_a_copy_in_another_source(prepared):
    files = {"some.jsonl": SHOWN, "all.jsonl": SHOWN}
    sources = [{"path": "some.jsonl", "weight": 0.5}, "all.jsonl"]
    run = prepared(files, files={"demonstrations": sources})
    not_drawn = run.metrics["num_dropped_demonstrations_not_drawn"]
    assert 0 < not_drawn < len(SHOWN)
    assert run.metrics["num_demonstrations"] == len(SHOWN)
    assert run.report()["demonstrations", "all.jsonl"][1] == not_drawn


def test_weights_do_not_change_how_many_prompts_and_pairs_are_split_off(prepared):
    pairs = [{"prompt": f"q{i}", "chosen": "b", "rejected": "c"} for i in range(40)]
    files = {
        "prompts": {"path": "a.jsonl", "weight": 0.2},
        "preferences": {"path": "a.jsonl", "weight": 3.0},
    }
    run = prepared({"a.jsonl": pairs}, files=files, held_out=10)
    assert run.report()["held_out", "a.jsonl"] == (10, 10, 10, {})
    assert run.report()["held_out_preferences", "a.jsonl"] == (10, 10, 10, {})


def test_a_row_that_is_there_often_is_drawn_no_more_often(prepared):
    sources = {"path": "some.jsonl", "weight": 0.5}
    once = prepared({"some.jsonl": SHOWN}, files={"demonstrations": sources})
    often = prepared({"some.jsonl": SHOWN * 5}, "often", files={"demonstrations": sources})
    assert often.rows("demonstrations") == once.rows("demonstrations")


@pytest.mark.parametrize("held_out", [0, 1])
def test_a_task_that_is_no_text_is_refused_before_anything_is_evaluated(prepared, held_out):
    role = "prompts" if held_out else "held_out"
    rows = [{"prompt": f"a{i}", "task": 3} for i in range(4)]
    with pytest.raises(StageError, match=rf"{role}\.jsonl line \d: 'task' is 3: write text"):
        prepared({f"{role}.jsonl": rows}, held_out=held_out)


def test_weights_above_one_make_no_sense_for_prompts(prepared):
    with pytest.raises(ValueError, match="each prompt is there once"):
        prepared({}, files={"prompts": {"path": "a.jsonl", "weight": 2.0}})


def test_a_row_that_does_not_fit_is_dropped_and_counted_or_refused(prepared):
    rows = [{"prompt": "a", "completion": "b" * 20}, {"prompt": "c", "completion": "d" * 40}]
    model = {"max_length": 30}
    run = prepared({"demonstrations.jsonl": rows}, model=model)
    counted = (2, 1, 1, {"too_long": 1})
    assert run.report()["demonstrations", "demonstrations.jsonl"] == counted
    with pytest.raises(StageError, match=r"demonstrations\.jsonl line 2: .* 43 tokens together"):
        prepared({"demonstrations.jsonl": rows}, "refused", model=model, too_long="refuse")


def test_a_role_that_loses_all_its_rows_is_refused_with_the_reasons(prepared):
    with pytest.raises(StageError, match=r"no row of the demonstrations is left \(40 too_long\)"):
        prepared({"demonstrations.jsonl": SHOWN}, model={"max_length": 13})


def test_unreadable_rows_are_refused_or_dropped_and_counted(prepared):
    text = '{"prompt": "a"}\nnot json\n{"prompt": 5}\n{"prompt": "\\ud800"}\n'
    with pytest.raises(StageError, match=r"prompts\.jsonl line 2.*prepare\.bad_rows to drop"):
        prepared({"prompts.jsonl": text}, held_out=0)
    run = prepared({"prompts.jsonl": text}, "dropped", bad_rows="drop", held_out=0)
    assert run.report()["prompts", "prompts.jsonl"] == (4, 1, 1, {"unreadable": 3})


def test_a_file_serves_several_roles_and_globs_are_read_in_order(prepared):
    files = {"b/2.jsonl": PAIRS[20:], "b/1.jsonl": PAIRS[:20], "notes.csv": "a\n1\n"}
    run = prepared(
        files,
        held_out=10,
        files={
            "preferences": "b/*.jsonl",
            "prompts": ["b/*.jsonl"],
            "demonstrations": {"path": "b/*.jsonl", "take": "chosen"},
        },
    )
    for role in ("preferences", "prompts", "demonstrations"):
        assert prompts(run, role) == prompts(run, "preferences")
        assert len(prompts(run, role)) == 30
    shown = run.rows("demonstrations")
    assert [row["source"] for row in shown] == sorted(row["source"] for row in shown)
    assert all(f"a{row['prompt'].split()[1]}" == row["completion"] for row in shown)
    for row in shown:
        source = "b/1.jsonl" if int(row["prompt"].split()[1]) < 20 else "b/2.jsonl"
        assert row["source"] == source
        assert (
            json.loads((run.root / "data" / source).read_text().splitlines()[row["line"] - 1])[
                "prompt"
            ]
            == row["prompt"]
        )
    report = json.loads((run.root / "artifacts/data/report.json").read_text())
    assert report["unused_files"] == ["notes.csv"]


def test_a_path_that_matches_nothing_is_refused(prepared):
    with pytest.raises(StageError, match=r"prepare\.files\.prompts: 'x/\*' matches no file"):
        prepared({}, files={"prompts": "x/*"})


@pytest.mark.parametrize("path", ["**x/a.jsonl", "."])
def test_what_is_no_glob_matches_nothing(prepared, path):
    with pytest.raises(StageError, match="matches no file"):
        prepared({"a.jsonl": []}, files={"prompts": path})


def test_a_name_that_looks_like_a_glob_is_a_name_where_there_is_such_a_file(prepared):
    run = prepared({"a[1].jsonl": [{"prompt": "x"}]}, files={"prompts": "a[1].jsonl"}, held_out=0)
    assert [row["source"] for row in run.rows("prompts")] == ["a[1].jsonl"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"q": "prompt"}, r"a\.jsonl line 1: `columns` calls 'q' 'prompt', and there is a column"),
        ({"finall": "answer"}, r"a\.jsonl: `columns` renames 'finall', and no row has that"),
    ],
)
def test_columns_that_cannot_be_renamed_are_refused_by_file(prepared, columns, message):
    rows = [{"prompt": "a", "q": "b", "final": "7"}]
    with pytest.raises(StageError, match=message):
        prepared({"a.jsonl": rows}, files={"prompts": {"path": "a.jsonl", "columns": columns}})


def test_half_a_character_is_refused_wherever_in_the_row_it_is(prepared):
    rows = '{"prompt": "a", "completion": "b", "note": "\\ud800"}\n'
    with pytest.raises(StageError, match=r"demonstrations\.jsonl line 1: .*half a character"):
        prepared({"demonstrations.jsonl": rows})


def test_two_files_of_one_role_are_refused_where_no_source_is_named(prepared):
    files = {"prompts.jsonl": PROMPTS, "prompts.json": json.dumps(PROMPTS)}
    with pytest.raises(StageError, match=r"prompts\.json and prompts\.jsonl are both prompts"):
        prepared(files)


def test_row_ids_name_content_and_not_its_place(prepared):
    run = prepared({"demonstrations.jsonl": SHOWN})
    other = prepared({"demonstrations.jsonl": SHOWN[::-1]}, "other")
    ids = {row["prompt"]: row["row_id"] for row in run.rows("demonstrations")}
    assert {row["prompt"]: row["row_id"] for row in other.rows("demonstrations")} == ids
    assert len(set(ids.values())) == 40
