"""How tests wait: no longer than somebody is at work on what they wait for."""

import subprocess
import sys

import pytest

from tests import waiting
from tests.waiting import until


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_S", 0.05)
    monkeypatch.setattr(waiting, "LAST_S", 0.2)


def test_what_comes_late_from_one_that_has_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LAST_S", waiting.TIMEOUT_S)
    looks: list[None] = []
    assert until(lambda: looks, "one look", at_work=lambda: looks.append(None))


def test_a_process_that_died_is_not_waited_for_and_its_last_words_are_told() -> None:
    words = [sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)"]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process,
        pytest.raises(pytest.fail.Exception) as caught,
    ):
        until(lambda: False, "it answers", at_work=process)
    said = str(caught.value)
    assert said.startswith("nobody is at work on it any more: it answers")
    assert "ended with 3 and said\nno such model" in said


def test_one_that_lives_is_waited_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "TIMEOUT_S", 0.5)
    with pytest.raises(pytest.fail.Exception, match=r"not within 0.5 s: it answers; try again"):
        until(lambda: False, "it answers", otherwise=lambda: "; try again")
