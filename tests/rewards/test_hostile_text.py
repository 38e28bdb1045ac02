"""Text that makes a careless pattern go over it again from every place takes no longer than other.

A check that grows with the square of the text would need the better part of an hour for one of
these, and a process that judges responses is ended long before.
"""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.contracts.rewards import Judge
from stages.environments import python
from stages.environments.calculator import Calculator
from stages.rewards import instructions, judge, maths, multiple_choice
from stages.rewards.code import program_of
from stages.rewards.instructions import follows
from tests.waiting import must_not_wait

LENGTH = 1 << 21
JUDGE = Judge(
    kind="judge", url="http://localhost/v1", model="m", template="{response}", low=0, high=10
)
ARGUMENTS = {
    "detectable_content:number_placeholders": {"num_placeholders": 1},
    "detectable_format:number_bullet_lists": {"num_bullets": 1},
    "detectable_format:number_highlighted_sections": {"num_highlights": 1},
    "detectable_format:title": {},
    "length_constraints:number_sentences": {"num_sentences": 2, "relation": "at least"},
    "detectable_format:json_format": {},
}


def repeated(piece, start="", end=""):
    return start + piece * (LENGTH // len(piece)) + end


@must_not_wait
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("detectable_content:number_placeholders", repeated("[")),
        ("detectable_content:number_placeholders", repeated("[a")),
        ("detectable_format:number_bullet_lists", repeated("\n", "x", "x")),
        ("detectable_format:number_bullet_lists", repeated(" ", "x", "x")),
        ("detectable_format:number_highlighted_sections", repeated("**a\n")),
        ("detectable_format:title", repeated("<<")),
        ("length_constraints:number_sentences", repeated(".", end="a")),
        ("length_constraints:number_sentences", repeated(".)", end="a")),
        ("detectable_format:json_format", repeated("[")),
        ("detectable_format:json_format", repeated("```")),
    ],
)
def test_an_instruction_that_was_not_followed_is_soon_seen(name, text):
    assert not follows(text, name, ARGUMENTS[name])


@must_not_wait
@pytest.mark.parametrize(
    "text",
    [
        repeated(":", "answer"),
        repeated(" =", "answer"),
        repeated(" is", "option"),
        repeated(r"\text{"),
        repeated(r"\text{", r"\boxed{", "}"),
        repeated("(", end="a"),
    ],
)
def test_a_response_that_chooses_nothing_is_soon_seen(text):
    assert multiple_choice.choice(text, "BC") is None


@must_not_wait
def test_numbers_that_do_not_end_are_soon_seen():
    assert not maths._PERCENT.fullmatch(repeated("1", end="a"))
    assert judge.parse(repeated(" ", end="7"), JUDGE) == 7
    assert judge.parse(repeated("10."), JUDGE) is None
    for text in (repeated("```py\n"), repeated("x\n", "```py\n"), repeated(" ", "```", "`")):
        assert not python._CALL.search(text)
    for text in (repeated("1,"), repeated("."), repeated("{", r"\boxed{"), repeated("-1")):
        assert not maths.is_plainly_right(text, "2")
    environment = Calculator()
    environment.reset({"answer": "2"}, 0)
    assert environment.step(repeated("calc(")).done


TEXTS = st.text(alphabet="[]<>*-.!?)' \n\ta1", max_size=30)


@given(TEXTS)
def test_a_check_counts_what_the_plain_pattern_counts(text):
    bullets = len(re.findall(r"^\s*(?:\*[^*\n]|-).*$", text, re.MULTILINE))
    assert instructions._bullets(text, bullets)
    placeholders = len(re.findall(r"\[.*?\]", text))
    assert instructions._placeholders(text, placeholders)
    assert not instructions._placeholders(text, placeholders + 1)
    ends = re.split(r"[.!?]+[\"')\]]*(?=\s|$)", text)
    assert instructions._SENTENCE_END.split(text) == ends
    titles = re.findall(r"<<[^\n]+>>", text)
    assert instructions._title(text) == any(title.strip("< >") for title in titles)


@given(st.text(alphabet="$-+1,.\\% \n", max_size=12))
def test_a_percentage_is_what_the_plain_pattern_takes_for_one(text):
    plain = re.compile(r"\$?\s*[-+]?[\d,]*\.?\d+\s*(?:\\\s*)?%\s*\$?")
    assert bool(maths._PERCENT.fullmatch(text)) == bool(plain.fullmatch(text))


@given(st.lists(st.sampled_from(["\\text{", "}", "B", ")", " ", "\n", "a"]), max_size=12))
def test_text_in_a_formula_is_taken_out_as_the_plain_pattern_does(parts):
    text = "".join(parts)
    plain = re.sub(r"\\text\{(.*?)\}", r"\1", text)
    assert multiple_choice._TEXT.sub(lambda f: f[1] if f[2] else f[0], text) == plain


@must_not_wait
@pytest.mark.parametrize("piece", ["`", "```", "```a ", "```python ", "```\t", "\n```", "```a\n"])
def test_a_program_is_soon_found_among_fences(piece):
    assert program_of(repeated(piece)) is not None
