"""A judge behind an OpenAI-compatible endpoint, which a real HTTP server plays."""

import threading

import pytest

from stages.context import StageError
from stages.contracts.rewards import Judge
from stages.rewards.judge import parse
from tests.rewards.conftest import row

ROWS = [row(str(number), index=number, level=number) for number in range(4)]
TEMPLATE = "Task: {prompt}\nLevel {level}\nRight: {answer}\nGiven: {response}\n{}: 0 to 10"


def completion(text):
    return 200, {}, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def asked(score, server, rows=ROWS, folder=None, **params):
    where = {} if folder is None else {"folder": folder}
    values = {"template": TEMPLATE, "model": "big", "url": f"{server.url}/v1", **params}
    return score(rows, **where, kind="judge", **values)


def test_the_judge_is_asked_about_each_response(score, server, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_WORD", "a-secret-word")
    server.answer = lambda body, _: completion(
        "It is " + body["messages"][-1]["content"].split("Given: ")[1][0] + "/10."
    )
    rewards = asked(score, server, token_variable="JUDGE_WORD", system="Be fair.", max_tokens=9)
    assert rewards == [0.0, 1.0, 2.0, 3.0]
    path, headers, body = min(server.requests, key=lambda item: str(item[2]))
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer a-secret-word"
    assert body == {
        "model": "big",
        "messages": [
            {"role": "system", "content": "Be fair."},
            {
                "role": "user",
                "content": "Task: What is 2 + 2, for the 0th time?\nLevel 0\nRight: 4\nGiven: 0\n"
                "{}: 0 to 10",
            },
        ],
        "temperature": 0,
        "max_tokens": 9,
    }


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8", 8.0),
        ("I give it 8/10.", 8.0),
        ("First 3, then in the end 7.5 out of 10", 7.5),
        ("Score: **9**", 9.0),
        ("-1", None),
        ("11", None),
        ("8/100", None),
        ("none", None),
        ("", None),
        ("Rating: 10", 10.0),
        ("8 Out Of 10", 8.0),
        ("I give it 8 out of a possible 10.", 8.0),
        ("I rate it 7 on a scale of 0 to 10", 7.0),
        ("7 on a scale from 0-10.", 7.0),
        ("6.5 on a 10-point scale", 6.5),
        ("On a scale of 10, a score of 10", 10.0),
    ],
)
def test_numbers_in_words(text, number) -> None:
    params = Judge(kind="judge", url="http://x", model="m", template="{response}")
    assert parse(text, params) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ('{"score": 4}', 4.0),
        ('Thinking {"score": 1} ... ```json\n{"why": "x", "score": 6.5}\n```', 6.5),
        ('{"score": "4"}', None),
        ('{"score": true}', None),
        ('{"other": 4}', None),
        ('{"score": 40}', None),
        ('{"score": 7, "details": {"score": 2}}', 7.0),
        ('{"result": {"score": 3}}', 3.0),
        ('{"results": [{"score": 3}, {"score": 5}]}', 5.0),
        ('{"score": 1' + "0" * 400 + "}", None),
        ("4", None),
    ],
)
def test_numbers_in_json(text, number) -> None:
    params = Judge(kind="judge", url="http://x", model="m", template="{response}", field="score")
    assert parse(text, params) == number


def test_numbers_may_be_large() -> None:
    params = Judge(kind="judge", url="http://x", model="m", template="{response}", high=2e6)
    assert parse("I say 1,000", params) == 1000.0
    assert parse("1,234,567.5 out of 2000000", params) == 1234567.5


def test_an_answer_that_was_cut_has_no_number(score, server) -> None:
    """Its last number is one that the judge came by on its way."""
    cut = {"choices": [{"message": {"content": "1. It is 2"}, "finish_reason": "length"}]}
    server.answer = lambda *_: (200, {}, cut)
    for _ in range(2):
        with pytest.raises(StageError, match=r"p0, sample 0 .*cut after rewards\.mine\.max_tokens"):
            asked(score, server, ROWS[:1])
    assert len(server.requests) == 1
    assert asked(score, server, ROWS[:1], on_unparsable=0.5) == [0.5]


@pytest.mark.parametrize("content", [[{"type": "text", "text": "8"}], 8, {"score": 8}])
def test_an_answer_that_is_no_text_is_shown(score, server, content) -> None:
    server.answer = lambda *_: (200, {}, {"choices": [{"message": {"content": content}}]})
    with pytest.raises(StageError, match="answered no chat completion"):
        asked(score, server, ROWS[:1])


def test_an_answer_without_a_number_is_an_error_or_worth_what_is_said(score, server) -> None:
    server.answer = lambda *_: completion("I would rather not.")
    with pytest.raises(StageError) as caught:
        asked(score, server, ROWS[:1])
    said = str(caught.value)
    assert "reward 'mine' for prompt p0, sample 0" in said
    assert "no number from 0 to 10: 'I would rather not.'" in said
    assert "rewards.mine.on_unparsable" in said
    assert asked(score, server, ROWS[:1], on_unparsable=-1.0) == [-1.0]


def test_what_was_answered_before_a_failure_is_not_asked_again(score, server) -> None:
    broken = threading.Event()
    broken.set()

    def answer(body, _):
        given = body["messages"][-1]["content"].split("Given: ")[1][0]
        return (400, {}, b"no") if given == "3" and broken.is_set() else completion(given)

    server.answer = answer
    with pytest.raises(StageError, match="400"):
        asked(score, server, concurrency=1)
    assert len(server.requests) == 4
    broken.clear()
    assert asked(score, server, concurrency=1) == [0.0, 1.0, 2.0, 3.0]
    assert len(server.requests) == 5
    assert asked(score, server, model="bigger") == [0.0, 1.0, 2.0, 3.0]
    assert len(server.requests) == 9, "another model is another question"


def test_what_is_no_chat_completion_is_shown(score, server) -> None:
    server.answer = lambda *_: (200, {}, {"error": {"message": "model not loaded"}})
    with pytest.raises(StageError, match=r"answered no chat completion.*model not loaded"):
        asked(score, server)


def test_templates_come_from_files_and_their_mistakes_are_named(score, server, tmp_path) -> None:
    server.answer = lambda *_: completion("5")
    (tmp_path / "judge.txt").write_text("{response}?")
    rewards = asked(score, server, ROWS[:1], tmp_path, template=None, file="judge.txt")
    assert rewards == [5.0]
    assert server.requests[0][2]["messages"][0]["content"] == "0?"
    with pytest.raises(StageError, match=r"nowhere\.txt"):
        asked(score, server, ROWS[:1], tmp_path, template=None, file="nowhere.txt")
    (tmp_path / "judge.txt").write_text("{prompt}?")
    with pytest.raises(StageError, match=r"judge\.txt has no \{response\}"):
        asked(score, server, ROWS[:1], tmp_path, template=None, file="judge.txt")
    with pytest.raises(StageError, match=r"has \{levle\}, which no row has; there are prompt"):
        asked(score, server, template="{response} {levle}")
