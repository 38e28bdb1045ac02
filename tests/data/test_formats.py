"""Every format, by hand: a row as others write it, and the one shape that it becomes."""

import json
import math
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from stages.contracts.params import Params
from stages.contracts.prepare import Turns
from stages.contracts.sources import Role, Source
from stages.data.dialogue import Dialogue, normalised
from stages.data.formats.detect import detect, renamed
from stages.data.formats.messages import from_transcript, is_transcript, messages_of
from stages.data.formats.table import FORMATS
from stages.data.items import Demonstration, Example, Labelled, Pair, Place, Rated, items_of
from stages.data.row_error import RowError

GUIDE = Path(__file__).resolve().parents[2] / "docs/data.md"

PLACE = Place("file.jsonl", 1, "line")
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}


def user(text):
    return {"role": "user", "content": text}


def calling(calls):
    return {"role": "assistant", "content": "", "tool_calls": calls}


def assistant(text):
    return {"role": "assistant", "content": text}


def tool(text):
    return {"role": "tool", "content": text}


def read(role, row, turns=Turns.ALL, most_pairs=0, **source):
    """The format's name, and what rows of the role say, without place, answer and extra."""
    source = Source(path="file.jsonl", **source)
    row = renamed(row, source.columns)
    columns = frozenset(name for name, value in row.items() if value is not None)
    format = detect(columns, Role(role), source)
    items = items_of(Role(role), format.given(row), PLACE, turns, most_pairs)
    return format.name.value, [content_of(item) for item in items]


def content_of(item: Example):
    before = list(item.prompt.messages)
    match item:
        case Demonstration(plain_text=True):
            return item.completion[0]["content"]
        case Demonstration():
            return before, list(item.completion)
        case Pair():
            return before, item.chosen, item.rejected, item.margin
        case Rated():
            return before, item.completion, item.rating
        case Labelled():
            return before, list(item.steps), list(item.labels)
        case _:
            return before


ASKED, ANSWER, OTHER = [user("a")], assistant("b"), assistant("c")
PAIR = (ASKED, ANSWER, OTHER, None)
TALK = [*ASKED, ANSWER, user("c"), assistant("d")]
SHARED = TALK[:3]
COMPARED = (SHARED, assistant("d"), assistant("e"), None)
HUMAN, GPT = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
HH = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"
WINDOWS = HH.replace("\n", "\r\n")
GOLDEN = [
    ("text", "demonstrations", {"text": "abc"}, "abc"),
    ("messages", "demonstrations", {"messages": TALK}, (ASKED, TALK[1:])),
    ("messages", "prompts", {"messages": TALK}, SHARED),
    ("messages", "prompts", {"messages": SHARED}, SHARED),
    (
        "messages",
        "demonstrations",
        {"messages": [SYSTEM, *ASKED, ANSWER, user("thanks")]},
        ([SYSTEM, *ASKED], [ANSWER]),
    ),
    (
        "messages",
        "demonstrations",
        {"messages": [*ASKED, CALL, tool("2"), assistant("It is 2.")], "tools": TOOLS},
        (ASKED, [CALL, tool("2"), assistant("It is 2.")]),
    ),
    ("messages_rated", "feedback", {"messages": TALK, "label": True}, (SHARED, assistant("d"), 1)),
    (
        "messages_preference",
        "preferences",
        {"messages": SHARED, "chosen": assistant("d"), "rejected": [assistant("e")]},
        COMPARED,
    ),
    ("prompt", "prompts", {"prompt": "a"}, ASKED),
    ("prompt", "held_out", {"prompt": ASKED, "answer": "b"}, ASKED),
    ("prompt", "prompts", {"prompt": "a", "system": "Be brief."}, [SYSTEM, *ASKED]),
    ("prompt_completion", "demonstrations", {"prompt": "a", "completion": "b"}, (ASKED, [ANSWER])),
    (
        "prompt_completion",
        "demonstrations",
        {"prompt": ASKED, "completion": [ANSWER]},
        (ASKED, [ANSWER]),
    ),
    (
        "preference",
        "preferences",
        {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2},
        (ASKED, ANSWER, OTHER, 2.0),
    ),
    (
        "preference",
        "preferences",
        {"prompt": "a", "chosen": [*ASKED, ANSWER], "rejected": [*ASKED, OTHER]},
        PAIR,
    ),
    ("preference", "preferences", {"prompt": HH, "chosen": "d", "rejected": "e"}, COMPARED),
    (
        "implicit_preference",
        "preferences",
        {"chosen": TALK, "rejected": [*SHARED, assistant("e")]},
        COMPARED,
    ),
    (
        "implicit_preference",
        "held_out_preferences",
        {"chosen": f"{HH} d", "rejected": f"{HH} e\n\nstill e"},
        (SHARED, assistant("d"), assistant("e\n\nstill e"), None),
    ),
    ("implicit_preference", "prompts", {"chosen": f"{HH} d", "rejected": f"{HH} e"}, SHARED),
    ("rated", "feedback", {"prompt": "a", "completion": "b", "label": False}, (ASKED, ANSWER, 0.0)),
    (
        "rated",
        "feedback",
        {"prompt": "a", "completion": "b", "rating": "0.5"},
        (ASKED, ANSWER, 0.5),
    ),
    (
        "stepwise",
        "steps",
        {"prompt": "a", "completions": ["b;", "c"], "labels": [True, False]},
        (ASKED, ["b;", "c"], [1.0, 0.0]),
    ),
    ("stepwise", "steps", {"prompt": "a", "steps": ["b"], "labels": [1]}, (ASKED, ["b"], [1.0])),
    (
        "alpaca",
        "demonstrations",
        {"instruction": "a", "input": "b", "output": "c", "system": "Be brief.", "history": None},
        ([SYSTEM, user("a\nb")], [OTHER]),
    ),
    (
        "alpaca",
        "demonstrations",
        {"instruction": "c", "input": "", "output": "d", "history": [["a", "b"]]},
        (ASKED, TALK[1:]),
    ),
    ("alpaca_prompt", "prompts", {"instruction": "a", "input": "b"}, [user("a\nb")]),
    (
        "alpaca_preference",
        "preferences",
        {"instruction": "a", "input": "", "chosen": "b", "rejected": "c"},
        PAIR,
    ),
    (
        "alpaca_rated",
        "feedback",
        {"instruction": "a", "output": "b", "kto_tag": "true"},
        (ASKED, ANSWER, 1.0),
    ),
    (
        "sharegpt",
        "demonstrations",
        {"system": "Be brief.", "conversations": [HUMAN, GPT]},
        ([SYSTEM, *ASKED], [ANSWER]),
    ),
    (
        "sharegpt",
        "demonstrations",
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                HUMAN,
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "It is 2."},
            ],
            "tools": '[{"name": "add"}]',
        },
        ([SYSTEM, *ASKED], [CALL, tool("2"), assistant("It is 2.")]),
    ),
    (
        "sharegpt_preference",
        "preferences",
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "c"}},
        PAIR,
    ),
    (
        "sharegpt_rated",
        "feedback",
        {"conversations": [HUMAN, GPT], "kto_tag": False},
        (ASKED, ANSWER, 0.0),
    ),
]


@pytest.mark.parametrize(("format", "role", "row", "expected"), GOLDEN)
def test_a_row_becomes_the_canonical_dialogue_detected_or_by_name(format, role, row, expected):
    assert read(role, row) == (format, [expected])
    assert read(role, row, format=format) == (format, [expected])


def test_every_format_has_a_golden_row():
    assert {name for name, *_ in GOLDEN} == {*FORMATS} - {"ranked"}


def test_ranked_responses_are_compared_two_by_two_and_the_lowest_rank_is_best():
    row = {
        "context": [user("a")],
        "completions": [
            {"rank": 2, "completion": [assistant("bad")]},
            {"rank": 0, "completion": [assistant("good")]},
            {"rank": 1, "completion": "fair"},
            {"rank": 1, "completion": "as fair"},
        ],
    }
    pairs = [
        ("good", "fair"),
        ("good", "as fair"),
        ("good", "bad"),
        ("fair", "bad"),
        ("as fair", "bad"),
    ]
    expected = [([user("a")], assistant(b), assistant(w), None) for b, w in pairs]
    assert read("preferences", row) == ("ranked", expected)
    assert read("preferences", row, most_pairs=2) == ("ranked", expected[:2])
    best = ([user("a")], [assistant("good")])
    assert read("demonstrations", row, take="chosen") == ("ranked", [best])


def test_pairs_serve_as_feedback_as_prompts_and_if_asked_as_demonstrations():
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    sides = [(ASKED, ANSWER, 1.0), (ASKED, OTHER, 0.0)]
    assert read("feedback", row) == ("preference", sides)
    assert read("prompts", row) == ("preference", [ASKED])
    assert read("demonstrations", row, take="chosen")[1] == [(ASKED, [ANSWER])]


def test_the_last_turn_alone_is_demonstrated_if_asked():
    assert read("demonstrations", {"messages": TALK}, Turns.LAST)[1] == [(SHARED, TALK[3:])]


def test_columns_are_renamed_at_once_and_null_leaves_one_out():
    columns = {"question": "prompt", "final": "answer", "answer": "solution", "noise": None}
    row = {"question": "a", "answer": "long", "final": "7", "noise": 1}
    source = Source(path="x.jsonl", columns=columns)
    given = FORMATS["prompt"].given(renamed(row, source.columns))
    assert (given.answer, given.extra) == ("7", {"solution": "long"})
    with pytest.raises(RowError, match="there is a column 'answer'"):
        renamed({"answer": "long", "final": "7"}, {"final": "answer"})


@pytest.mark.parametrize(
    ("role", "row", "message"),
    [
        ("prompts", {"question": "a"}, "'question' are of no known format. .*prompt \\(prompt\\)"),
        ("demonstrations", {"prompt": "a"}, "those of prompt, which gives no demonstrations"),
        ("demonstrations", {"text": "a", "instruction": "b", "output": "c"}, "text or alpaca"),
        (
            "demonstrations",
            {"prompt": "a", "completion": "b", "label": True},
            "not every rated response is to be imitated",
        ),
        ("demonstrations", {"prompt": "a", "chosen": "b", "rejected": "c"}, "`take: chosen`"),
        (
            "preferences",
            {"prompt": "a", "messages": [user("a")], "chosen": "b", "rejected": "c"},
            "may be messages_preference or preference: say which with `format`",
        ),
        ("preferences", {"chosen": "a", "rejected": "b"}, "there is no prompt"),
        ("preferences", {"chosen": TALK, "rejected": "b"}, "the other is not"),
        ("preferences", {"chosen": TALK, "rejected": TALK[2:]}, "differ before the last response"),
        (
            "preferences",
            {"prompt": "z", "chosen": TALK, "rejected": [*SHARED, assistant("e")]},
            "begins otherwise than the prompt",
        ),
        ("demonstrations", {"messages": [user("a")]}, "nothing to imitate"),
        ("demonstrations", {"messages": [assistant("a")]}, "no prompt before"),
        ("demonstrations", {"prompt": "a", "completion": ""}, "response is empty"),
        (
            "demonstrations",
            {"messages": [user("a"), assistant(""), user("b"), assistant("c")]},
            "response is empty",
        ),
        ("demonstrations", {"messages": []}, "has no messages"),
        ("demonstrations", {"messages": "a", "system": 5}, "'system' is int"),
        ("demonstrations", {"messages": [{"role": "robot", "content": "a"}]}, "of 'robot'"),
        ("demonstrations", {"messages": [user(5)]}, "content is int"),
        (
            "demonstrations",
            {"messages": [user([{"type": "image_url", "image_url": "x"}])]},
            "something other than text",
        ),
        ("demonstrations", {"messages": [SYSTEM, user("a")], "system": "x"}, "keep one"),
        ("demonstrations", {"text": ""}, "'text' is empty"),
        ("feedback", {"prompt": "a", "completion": "b", "label": 1, "rating": 1}, "this one has 2"),
        ("feedback", {"prompt": "a", "completion": "b", "label": "good"}, "'label' is str"),
        ("preferences", {"prompt": "a", "completions": ["b"]}, "'rank' and 'completion'"),
        (
            "preferences",
            {"context": "a", "completions": [{"rank": 1, "completion": "b"}]},
            "nothing to compare",
        ),
        ("prompts", {"instruction": "a", "history": ["b"]}, "pairs"),
        ("prompts", {"instruction": "a", "history": ["bc"]}, "pairs"),
        ("prompts", {"instruction": "a", "history": [[None, "b"]]}, "pairs"),
        ("prompts", {"instruction": "a", "history": 5}, "pairs"),
        ("feedback", {"prompt": "a", "completion": "b", "label": 10**400}, "write a number"),
        ("feedback", {"prompt": "a", "completion": "b", "label": 1e39}, "write a number"),
        ("demonstrations", {"prompt": "a", "completion": "b", "tools": [{"a": b"c"}]}, "bytes"),
        ("demonstrations", {"messages": [{**assistant("a"), "weight": 0}]}, "of weight 0"),
        ("demonstrations", {"messages": [calling(5)]}, "calls of tools that are int"),
        ("demonstrations", {"messages": [calling([{"function": "f"}])]}, "the tool's name"),
        (
            "demonstrations",
            {"messages": [calling([{"name": "f", "arguments": [1]}])]},
            "arguments are list",
        ),
        (
            "demonstrations",
            {"conversations": [{"from": "function_call", "value": None}]},
            "calls of tools that are NoneType",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(role, row, message):
    with pytest.raises(RowError, match=message):
        read(role, row)


def test_values_that_json_does_not_have_are_spelt_out_and_bytes_are_refused():
    row = {"prompt": "a", "at": datetime(2026, 1, 2), "score": math.nan, "cost": [Decimal("1.50")]}
    extra = FORMATS["prompt"].given(row).extra
    assert extra == {"at": "2026-01-02 00:00:00", "score": None, "cost": ["1.50"]}
    with pytest.raises(RowError, match="'image' holds bytes"):
        FORMATS["prompt"].given({"prompt": "a", "image": {"bytes": b"x"}})


def test_a_message_may_be_json_text_as_in_csv_and_text_in_parts():
    text = '[{"role": "user", "content": [{"type": "text", "text": "a"}]}]'
    for spaced in (text, text.replace("[{", "[\r\n  {"), text.replace('{"role"', '{  "role"')):
        assert read("prompts", {"messages": spaced})[1] == [[user("a")]]
    assert read("prompts", {"prompt": '{"a": 1}'})[1] == [[user('{"a": 1}')]]


@pytest.mark.parametrize(
    "printed",
    [
        "[{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]",
        "[{'content': 'a', 'role': 'user'}\n {'content': \"it's\", 'role': 'assistant'}]",
    ],
)
def test_messages_as_python_prints_them_are_refused_and_not_taken_for_words(printed):
    """pandas writes lists into CSV so, and with NumPy's arrays not even with commas."""
    for row in ({"messages": printed}, {"prompt": "a", "chosen": printed, "rejected": "c"}):
        with pytest.raises(RowError, match=r"as Python prints them .*: write JSON"):
            read("preferences" if "chosen" in row else "prompts", row)
    code = "[{'role': 'admin'}]"
    assert messages_of(code, "completion", "assistant") == [assistant(code)]


def test_text_that_only_looks_like_messages_stays_text():
    deep = '[{"a": ' + "[" * 100_000
    assert read("prompts", {"prompt": deep}) == ("prompt", [[user(deep)]])
    with pytest.raises(RowError, match="text that is not JSON"):
        read("demonstrations", {"prompt": "a", "completion": "b", "tools": deep})


@pytest.mark.parametrize(
    "words",
    [
        '{"from": "Berlin", "to": "Paris", "date": "5 May"}',
        '[{"role": "engineer", "years": 4}]',
        '{"value": 3}',
    ],
)
def test_a_response_that_is_json_about_something_else_is_its_text(words):
    assert messages_of(words, "completion", "assistant") == [assistant(words)]


def test_json_text_of_messages_by_somebody_unknown_is_refused_and_not_taken_for_words():
    for words in ('[{"role": "bot", "content": "b"}]', '[{"from": "bot", "value": "b"}]'):
        with pytest.raises(RowError, match="'completion' has a message of 'bot'"):
            messages_of(words, "completion", "assistant")
    one_is_wrong = '[{"role": "system", "content": "s"}, {"role": "user", "text": "hi"}]'
    with pytest.raises(RowError, match="'prompt' has a message whose content is"):
        messages_of(one_is_wrong, "prompt", "user")


def test_lists_may_be_json_text_as_in_csv():
    row = {"instruction": "c", "output": "d", "history": '[["a", "b"]]'}
    assert read("demonstrations", row)[1] == [(ASKED, TALK[1:])]
    steps = {"prompt": "a", "completions": '["b", "c"]', "labels": "[1, 0]"}
    assert read("steps", steps) == read(
        "steps", {**steps, "completions": ["b", "c"], "labels": [1, 0]}
    )
    ranked = [{"rank": 1, "completion": "b"}, {"rank": 2, "completion": "c"}]
    row = {"prompt": "a", "completions": ranked}
    as_text = {**row, "completions": json.dumps(ranked)}
    assert read("preferences", as_text) == read("preferences", row)


def test_a_transcript_is_told_from_a_text_that_speaks_of_humans():
    assert is_transcript("Human: a\n\nAssistant: b", "assistant")
    assert is_transcript("Human: a", "user")
    assert not is_transcript("Human: a", "assistant")
    assert not is_transcript("A Human: a\n\nAssistant: b", "user")
    assert not is_transcript("Assistant: a\n\nHuman: b", "user")
    assert is_transcript(WINDOWS, "assistant")
    assert from_transcript(WINDOWS) == from_transcript(HH) == [user("a"), assistant("b"), user("c")]
    assert from_transcript("\n\nHuman: a: b\n\nc\n\nAssistant: Human: d") == [
        user("a: b\n\nc"),
        assistant("Human: d"),
    ]


words = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=12)
turns = st.lists(words.map(str.strip).filter(bool), min_size=1, max_size=6)


@given(turns)
def test_a_transcript_gives_back_the_turns_that_it_was_made_of(texts):
    speakers = [("Human", "user"), ("Assistant", "assistant")]
    expected = [{"role": speakers[i % 2][1], "content": text} for i, text in enumerate(texts)]
    text = "".join(f"\n\n{speakers[i % 2][0]}: {text}" for i, text in enumerate(texts))
    assert from_transcript(text) == expected


@given(
    st.sampled_from([(name, role, row) for name, role, row, _ in GOLDEN]),
    st.dictionaries(st.sampled_from(["id", "source", "task", "score"]), words),
)
def test_columns_that_no_format_has_change_nothing_and_are_kept(golden, others):
    name, role, row = golden
    assert read(role, {**row, **others}) == read(role, row)
    assert FORMATS[name].given({**row, **others}).extra == others


@given(st.sets(st.sampled_from(sorted({c for f in FORMATS.values() for c in f.columns}))))
def test_detection_gives_one_format_whose_columns_are_there_or_says_what_to_do(columns):
    for role in Role:
        able = [f for f in FORMATS.values() if columns.issuperset(f.needs) and f.serves(role)]
        try:
            format = detect(frozenset(columns), role, Source(path="x"))
        except RowError as error:
            says = str(error)
        else:
            assert format in able
            says = "`columns`"
        assert any(way in says for way in ("`columns`", "`format`", "come from"))


letters = st.text("abXY12éß", min_size=1, max_size=6)


@given(letters, letters)
def test_normalising_hides_case_space_and_punctuation_and_nothing_else(left, right):
    assert normalised(f" {left.upper()}.  {right}!") == normalised(f"{left.upper()} {right}")
    assert (normalised(left) == normalised(right)) == (left.casefold() == right.casefold())


@pytest.mark.parametrize(
    "other",
    [
        "cafe\u0301 no 12",
        "caf\u00e9\u200b no\u2060 1\ufeff2",
        "\uff23\uff21\uff26\u00c9 no \uff11\uff12\uff1f",
        "cafe\u0301\u00a0no\u30001\u00ad2",
        "CAFE\u200d\u0301 n\u00ba 12",
    ],
    ids=ascii,
)
def test_the_same_text_in_another_encoding_is_the_same(other):
    assert normalised(other) == normalised("Café no 12")


@given(st.text(max_size=8))
def test_what_is_normalised_stays_as_it_is(text):
    assert normalised(normalised(text)) == normalised(text)


def test_signs_that_bear_meaning_are_not_hidden():
    problems = ["2+3=", "2-3=", "2 3=", "1+23=", "12+3=", "(1+2)*3", "1+(2*3)", "x<y", "x>y"]
    problems += ["2²=", "22=", "x₂", "x2", "x²"]
    assert len({normalised(problem) for problem in problems}) == len(problems)


def test_a_question_goes_by_its_text_and_a_dialogue_by_all_it_holds():
    question = Dialogue((user("system: x\n\nuser: y"),))
    dialogue = Dialogue(({"role": "system", "content": "x"}, user("y")))
    assert question.text == dialogue.text
    assert question.id != dialogue.id
    assert dialogue.id != Dialogue(dialogue.messages, ({"name": "add"},)).id


def test_the_guide_has_every_format_and_its_examples_are_params():
    text = GUIDE.read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in text.split("```yaml\n")[1:]]
    examples = [YAML(typ="safe").load(block) for block in blocks]
    named = [Params.model_validate(example).prepare.files for example in examples]
    assert sum(map(bool, named)) == 1
    table = text.partition("### Formats")[2].partition("###")[0]
    for name in FORMATS:
        style, _, suffix = name.partition("_")
        assert f"`{name}`" in table or (f"`{style}`" in table and f"`_{suffix}`" in table), name
