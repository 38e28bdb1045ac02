"""Built-in rules: numbers by hand, and every row of real data sets where they are at hand."""

import json
from pathlib import Path

import pytest

from stages.context import StageError
from stages.contracts.reward_rules import Instructions
from stages.rewards import instructions, maths
from tests.rewards.conftest import row

DATA = Path(__file__).resolve().parents[3] / "shared/data"


def rewards(score, pairs: list[tuple[str, str | None]], **params) -> list[float]:
    rows = [row(response, answer, index) for index, (response, answer) in enumerate(pairs)]
    return score(rows, **params)


def test_maths_by_hand(score) -> None:
    right = [
        (r"so the answer is \boxed{18}", "18"),
        ("The answer is 18.", "18"),
        ("3 + 15\n#### 18", "she has 3 and 15\n#### 18"),
        ("#### 1,234", "1234"),
        ("He makes $18 a day", "18"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"hence $\frac{1}{2}$", "1/2"),
        (r"\boxed{x+1}", "1+x"),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
        (r"\boxed{(1, 2)}", "(1,2)"),
        (r"\boxed{5 \text{ apples}}", "5"),
        (r"first \boxed{3}, no: \boxed{\frac{4}{2}}", "2"),
        (r"\boxed{50\%}", "50%"),
        (r"\boxed{50\%}", r"50\%"),
        ("It is 50%", r"50\%"),
        (r"\boxed{50\%}", "0.5"),
        ("x = \u22123", "-3"),
        ("-0.0", "0"),
    ]
    wrong = [
        (r"\boxed{3}, though 18 is what was asked", "18"),
        ("The answer is 81.", "18"),
        ("-18", "18"),
        ("1.8", "18"),
        ("", "18"),
        ("no idea", "18"),
        (r"\boxed{x-1}", "1+x"),
        ("#### 17\n18", "18"),
        (r"\boxed{5\%}", "50%"),
        (r"\boxed{17, 18}", "18"),
        ("\u22123", "3"),
    ]
    assert rewards(score, right, kind="maths") == [1.0] * len(right)
    assert rewards(score, wrong, kind="maths") == [0.0] * len(wrong)


def test_a_number_that_nobody_can_compute_counts_as_wrong(score, capfd) -> None:
    pairs = [("2", "2"), (r"\boxed{9^{9^{9^{9}}}}", "2"), ("2", "2")]
    assert rewards(score, pairs, kind="maths", timeout=3.0) == [1.0, 0.0, 1.0]
    said = capfd.readouterr().err
    assert "did not finish within 3 s for prompt p0, sample 1" in said


@pytest.mark.slow
def test_a_pattern_that_never_ends_is_named_with_its_row(score) -> None:
    pairs = [("aaaa", None), ("a" * 60 + "!", None)]
    with pytest.raises(StageError) as caught:
        rewards(score, pairs, kind="pattern", pattern="^(a|aa)+$", timeout=3.0)
    assert "reward 'mine' (pattern) did not finish within 3 s for prompt p0, sample 1" in str(
        caught.value
    )
    scored = rewards(
        score, pairs, kind="pattern", pattern="^(a|aa)+$", timeout=3.0, on_timeout=-1.0
    )
    assert scored == [1.0, -1.0]


def test_a_row_without_an_answer_is_named(score) -> None:
    with pytest.raises(StageError) as caught:
        rewards(score, [("1", "1"), ("2", None)], kind="maths")
    assert "prompt p0, sample 1" in str(caught.value)
    assert "has no 'answer'" in str(caught.value)


def test_a_response_that_was_cut_is_wrong_unless_that_is_allowed(score) -> None:
    cut = {**row("18", "18"), "finish_reason": "length"}
    assert score([cut], kind="maths") == [0.0]
    assert score([cut], kind="maths", must_end=False) == [1.0]


def test_multiple_choice(score) -> None:
    chosen = {
        "The answer is (B).": "B",
        "Answer: C": "C",
        r"\boxed{D}": "D",
        r"\boxed{\text{A}}": "A",
        "I think\nB": "B",
        "(A) is wrong, (C) is right": "C",
        "**B)** Paris": "B",
        "A dog barks": None,
        "the answer is a dog": None,
        "Because of C. elegans": "C",
        "the best choice is E": "E",
        "A. red\nB. green\nC. blue\n\nB": "B",
        "The correct option is B": "B",
        "Option A is wrong. Correct option: C": "C",
        "The answer is option D, not A": "D",
        "The answer must be **B**": "B",
        "Answer: $B$": "B",
        "answer: b": "B",
        "It is\n(b)": "B",
        r"\boxed{b}": "B",
        "the answer is a": "A",
        "the option is a good one": None,
        "the answer is not B": None,
        "": None,
    }
    pairs = [(response, letter or "E") for response, letter in chosen.items()]
    scored = rewards(score, pairs, kind="multiple_choice")
    assert scored == [float(letter is not None) for letter in chosen.values()]
    with pytest.raises(StageError, match="is none of the letters ABCDE"):
        rewards(score, [("B", "Paris")], kind="multiple_choice")
    assert rewards(score, [("B", "B) Paris"), ("(B)", "A. Rome")], kind="multiple_choice") == [1, 0]


def test_patterns_and_formats(score) -> None:
    pairs = [("x <a>4</a>", "4"), ("<a>5</a>", "4"), ("none", "4")]
    assert rewards(score, pairs, kind="pattern", pattern="<a>.*</a>") == [1, 1, 0]
    assert rewards(score, pairs, kind="pattern", pattern="<a>.*</a>", match="full") == [0, 1, 0]
    assert rewards(score, pairs, kind="pattern", pattern="<a>(?P<answer>.*)</a>") == [1, 0, 0]
    formats = [
        ("<think>hm\nhm</think>\n<answer>4</answer>\n", None),
        ("<think></think><answer>4</answer>", None),
        ("<answer>4</answer><think>hm</think>", None),
        ("<think>hm</think><answer>4</answer> and more", None),
        ("<think>a</think><think>b</think><answer>4</answer>", None),
        ("<think>a<answer>4</answer></think><answer>4</answer>", None),
        ("<answer>4</answer>", None),
    ]
    assert rewards(score, formats, kind="format") == [1, 1, 0, 0, 0, 0, 0]


def test_json_schemas(score, tmp_path) -> None:
    schema = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}
    pairs = [
        ('{"n": 3}', None),
        ('```json\n{"n": 3}\n```', None),
        ('{"n": 3.5}', None),
        ("{}", None),
        ('Here: {"n": 3}', None),
        ('{"n": NaN}', None),
        ("[" * 100000, None),
        ('```json \r\n\n{"n": 3}\n\n```', None),
        ("```json" + "\n" * 20000 + "x", None),
    ]
    expected = [1, 1, 0, 0, 0, 0, 0, 1, 0]
    assert rewards(score, pairs, kind="json_schema", definition=schema) == expected
    (tmp_path / "n.json").write_text(json.dumps(schema))
    rows = [row(response, None, index) for index, (response, _) in enumerate(pairs)]
    assert score(rows, tmp_path, kind="json_schema", file="n.json") == expected
    with pytest.raises(StageError, match="http://nowhere"):
        rewards(score, pairs[:1], kind="json_schema", definition={"$ref": "http://nowhere/x.json"})


def test_a_number_too_large_to_be_divided_fits_no_schema(score) -> None:
    cents = {"type": "object", "properties": {"x": {"multipleOf": 0.01}}}
    pairs = [('{"x": 1.25}', None), ('{"x": 1e999}', None), (f'{{"x": {"7" * 400}}}', None)]
    assert rewards(score, pairs, kind="json_schema", definition=cents) == [1.0, 0.0, 0.0]


def test_lengths_by_hand(score) -> None:
    words = [(" ".join(["w"] * count), None) for count in (0, 2, 4, 6, 9)]

    def of(**params) -> list[float]:
        return rewards(score, words, kind="length", unit="words", target=4, **params)

    assert of() == [0.0, 0.5, 1.0, 0.5, 0.0]
    assert of(width=8) == [0.5, 0.75, 1.0, 0.75, 1 - 5 / 8]
    assert of(side="longer") == [1.0, 1.0, 1.0, 0.5, 0.0]
    assert of(side="shorter") == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert of(shape="cosine") == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0])
    assert of(shape="cosine", width=8)[1] == pytest.approx(0.8535533905932737)
    tokens = rewards(score, [("abc", None)], kind="length", target=4)
    assert tokens == [0.75], "response_ids are counted, here one a character"


def test_repetition_by_hand(score) -> None:
    pairs = [("a b c d", None), ("a b A b a b", None), ("a", None), ("x x x x x", None)]
    # Of four pairs of words in `a b a b a b` ... five, three are said again; of `x x` ... three.
    assert rewards(score, pairs, kind="repetition", ngram=2) == [0.0, 2 / 5 - 1, 0.0, 1 / 4 - 1]


FOLLOWED = {
    "change_case:capital_word_frequency": (
        "GO now AND stay",
        "go NOW",
        {"capital_relation": "at least", "capital_frequency": 2},
    ),
    "change_case:english_capital": ("ALL OF IT.", "All of it.", {}),
    "change_case:english_lowercase": ("all of it.", "All of it.", {}),
    "combination:repeat_prompt": (
        "Say it. Said.",
        "Said. Say it.",
        {"prompt_to_repeat": "Say it."},
    ),
    "combination:two_responses": ("one\n******\ntwo", "one\n******\none", {}),
    "detectable_content:number_placeholders": (
        "[name] and [place]",
        "[name]",
        {"num_placeholders": 2},
    ),
    "detectable_content:postscript": (
        "Bye.\nP.S. more",
        "Bye. PS more",
        {"postscript_marker": "P.S."},
    ),
    "detectable_format:constrained_response": ("My answer is no.", "No.", {}),
    "detectable_format:json_format": ('```json\n{"a": 1}\n```', "a: 1", {}),
    "detectable_format:multiple_sections": (
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na",
        {"section_spliter": "SECTION", "num_sections": 2},
    ),
    "detectable_format:number_bullet_lists": ("* a\n- b", "* a\n* b\n* c", {"num_bullets": 2}),
    "detectable_format:number_highlighted_sections": (
        "*a* and **b**",
        "*a* and b",
        {"num_highlights": 2},
    ),
    "detectable_format:title": ("<<Title>>\ntext", "<< >>\ntext", {}),
    "keywords:existence": ("The Cat sat", "The dog sat", {"keywords": ["cat", "sat"]}),
    "keywords:forbidden_words": ("concatenate", "a Cat", {"forbidden_words": ["cat"]}),
    "keywords:frequency": (
        "cat Cat",
        "cat",
        {"keyword": "cat", "frequency": 2, "relation": "at least"},
    ),
    "keywords:letter_frequency": (
        "aA",
        "aaa",
        {"letter": "a", "let_frequency": 3, "let_relation": "less than"},
    ),
    "length_constraints:nth_paragraph_first_word": (
        'a\n\n"Well, b',
        "a\n\nb Well",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "well"},
    ),
    "length_constraints:number_paragraphs": ("a\n***\nb", "a\n\nb", {"num_paragraphs": 2}),
    "length_constraints:number_sentences": (
        "One. Two! Three?",
        "One. Two.",
        {"num_sentences": 3, "relation": "at least"},
    ),
    "length_constraints:number_words": ("a b", "a b c", {"num_words": 3, "relation": "less than"}),
    "punctuation:no_comma": ("a b", "a, b", {}),
    "startend:end_checker": ("Well. The end.", "The end. Well.", {"end_phrase": "the end."}),
    "startend:quotation": ('"All of it"', 'All "of it"', {}),
}


@pytest.mark.parametrize("name", sorted(instructions.CHECKS))
def test_each_instruction_tells_two_responses_apart(name) -> None:
    yes, no, arguments = FOLLOWED[name]
    assert instructions.follows(yes, name, arguments)
    assert not instructions.follows(no, name, arguments)
    assert not instructions.follows(" ", name, arguments)


def test_json_that_is_too_deep_is_wrong_and_a_schema_without_end_is_refused(score) -> None:
    """Neither a response that can be read nor one that cannot may end the stage."""
    tree = {"type": "object", "properties": {"a": {"$ref": "#"}}}
    deep = ['{"a": ' * depth + "{}" + "}" * depth for depth in (3, 400, 50_000)]
    pairs = [(text, None) for text in deep]
    assert rewards(score, pairs, kind="json_schema", definition=tree) == [1.0, 0.0, 0.0]
    with pytest.raises(StageError, match="refers to itself without end"):
        rewards(score, [("{}", None)], kind="json_schema", definition={"$ref": "#"})


def test_a_postscript_is_where_and_as_ifeval_finds_it() -> None:
    def follows(text: str, marker: str) -> bool:
        given = {"postscript_marker": marker}
        return instructions.follows(text, "detectable_content:postscript", given)

    assert follows("Best wishes. P.S. Bring tea.", "P.S.")
    assert follows("Bye.\np. s. Bring tea.", "P.S.")
    assert follows("Bye.\nP.P.S bring tea.", "P.P.S")
    assert not follows("Bye.\npps bring tea.", "P.P.S")
    assert not follows("Bye.\nPS bring tea.", "P.S.")


def test_instructions_of_rows_and_of_the_source(score) -> None:
    columns = {
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
        "kwargs": [{}, {"keywords": ["tea"], "num_words": None}],
    }
    rows = [row(text, None, i, **columns) for i, text in enumerate(["tea", "tea, tea", "no, no"])]
    assert score(rows, kind="instructions") == [1.0, 0.0, 0.0]
    assert score(rows, kind="instructions", counted="share") == [1.0, 0.5, 0.0]
    as_in_csv = {name: json.dumps(value) for name, value in columns.items()}
    texts = [row(text, None, i, **as_in_csv) for i, text in enumerate(["tea", "tea, tea"])]
    assert score(texts, kind="instructions") == [1.0, 0.0]
    fixed = [
        {
            "id": "length_constraints:number_words",
            "kwargs": {"num_words": 2, "relation": "at least"},
        }
    ]
    assert score(rows, kind="instructions", instructions=fixed) == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("instruction", "said"),
    [
        ({"id": "punctuation:no_coma"}, "did you mean punctuation:no_comma"),
        ({"id": "keywords:existence"}, "keywords:existence lacks keywords"),
        (
            {"id": "detectable_format:number_bullet_lists", "kwargs": {"num_bullet": 2}},
            "takes num_bullets, not num_bullet",
        ),
    ],
)
def test_an_instruction_that_is_misspelt_in_params_is_named_before_anything_is_scored(
    score, tmp_path, instruction, said
) -> None:
    params = {"instructions": [instruction], "unsupported": "skip"}
    source = Instructions.model_validate({"kind": "instructions", **params})
    with pytest.raises(ValueError, match=said):
        instructions.open_rule(source, tmp_path)
    with pytest.raises(StageError, match=said):
        score([row("a", None)], kind="instructions", **params)


def test_numbers_of_instructions_may_be_floats_as_tables_with_nulls_have_them() -> None:
    arguments = {"num_paragraphs": 2.0, "nth_paragraph": 2.0, "first_word": "b"}
    assert instructions.follows("a\n\nb", "length_constraints:nth_paragraph_first_word", arguments)


def test_the_length_of_an_episode_is_what_the_policy_said(score) -> None:
    """Four tokens, of which two are the environment's."""
    episode = {**row("abcd"), "loss_mask": [1, 0, 0, 1]}
    assert score([episode], kind="length", unit="tokens", target=2, width=4) == [1.0]


def test_instructions_without_a_check_are_named_or_left_out(score) -> None:
    columns = {
        "instruction_id_list": ["language:response_language", "punctuation:no_comma"],
        "kwargs": [{"language": "de"}, {}],
    }
    rows = [row("gut", None, **columns)]
    with pytest.raises(
        StageError, match="no check for its instruction 'language:response_language'"
    ):
        score(rows, kind="instructions")
    assert score(rows, kind="instructions", unsupported="skip") == [1.0]
    with pytest.raises(StageError, match="no column 'instruction_id_list'"):
        score([row("gut")], kind="instructions")
    fixed = [{"id": "length_constraints:number_words", "kwargs": {"relation": "at least"}}]
    with pytest.raises(StageError, match="lacks num_words"):
        score([row("gut")], kind="instructions", instructions=fixed)


def lines(name: str) -> list[dict]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not here")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_gold_answer_of_gsm8k_is_right_and_no_other_number_is() -> None:
    for item in lines("gsm8k_test.jsonl"):
        gold, final = item["answer"], item["final"]
        assert maths.is_right(gold, gold), item
        assert maths.is_right(rf"So it is \boxed{{{final}}}.", gold), item
        assert maths.is_right(f"#### {final}", gold), item
        other = str(int(final.replace(",", "")) + 1)
        assert not maths.is_right(rf"So it is \boxed{{{other}}}.", gold), item
        assert not maths.is_right(gold.rsplit("####", 1)[0] + f"#### {other}", gold), item


def test_the_answer_of_svamp_in_a_sentence_is_right() -> None:
    for item in lines("svamp.jsonl")[:150]:
        final = item["final"]
        assert maths.is_right(f"Counting it all, the answer is {final}.", final), item
        assert not maths.is_right(f"Counting it all, the answer is {final}7.", final), item


def test_every_instruction_of_ifeval_but_the_language_can_be_checked() -> None:
    params = Instructions(kind="instructions", unsupported="skip")  # type: ignore[arg-type]
    rule = instructions.open_rule(params, Path())
    unknown = set()
    for item in lines("ifeval.jsonl"):
        names = item["instruction_id_list"]
        unknown |= set(names) - instructions.CHECKS.keys()
        if set(names) <= {"language:response_language"}:
            continue
        extra = {"instruction_id_list": names, "kwargs": item["kwargs"]}
        for text in ("A plain text, in one line.", "* a\n* b\n\nP.S. *c* [d]"):
            assert rule({"response": text, "extra": extra}) in (0.0, 1.0)
    assert unknown == {"language:response_language"}
