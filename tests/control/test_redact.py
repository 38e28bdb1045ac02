"""Secrets of the environment are replaced wherever text leaves a process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.base.redact import Redaction, redact

ENVIRONMENT = {
    "HF_TOKEN": "hf_abcdef123",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtn",
    "DB_PASSWORD": "hunter2222",
    "OPENAI_API_KEY": "sk-1234567",
    "PREFECT_API_AUTH_STRING": "8f14e45fce",
    "HOME": "/home/somebody",
    "KEYBOARD": "qwerty-layout",
}


def test_values_of_secret_variables_are_replaced() -> None:
    text = "token hf_abcdef123 key wJalrXUtn password hunter2222 sk-1234567 8f14e45fce"
    assert redact(text, ENVIRONMENT) == "token *** key *** password *** *** ***"


def test_ordinary_values_stay() -> None:
    assert redact("/home/somebody qwerty-layout", ENVIRONMENT) == "/home/somebody qwerty-layout"


def test_credentials_in_addresses_are_replaced() -> None:
    assert redact("http://me:secret@host:5000/x", {}) == "http://***@host:5000/x"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DB_PASS", "hunter2222"),
        ("MYSQL_PWD", "hunter2222"),
        ("SLACK_WEBHOOK", "https://example.org/T0/B0/xyz"),
        ("NOTIFY_URL", "https://hooks.slack.com/services/T0/B0/xyz"),
        ("ALERTS", "https://discord.com/api/webhooks/1/xyz"),
        ("AZURE_STORAGE_CONNECTION_STRING", "AccountName=me;AccountKey=xyz=="),
        ("SHARED_DATA", "https://store.example.org/data.zip?se=2030&sig=xyz"),
        ("JUDGE", "sk-proj-abcdefghijkl"),
        ("MY_LOGIN", "ghp_abcdefghijkl"),
        ("DEPLOY", "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1r\n-----END-----"),
    ],
)
def test_secrets_are_known_by_the_name_or_the_form_of_their_value(name: str, value: str) -> None:
    for line in value.splitlines():
        assert redact(f"<{line}>", {name: value}) == "<***>"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PWD", "/home/somebody"),
        ("OLDPWD", "/home/somebody"),
        ("BYPASS", "everything"),
        ("MLFLOW_TRACKING_URI", "http://localhost:5000"),
        ("SKETCH", "sk-etch"),
    ],
)
def test_what_only_looks_a_little_like_a_secret_stays(name: str, value: str) -> None:
    assert redact(f"<{value}>", {name: value}) == f"<{value}>"


def test_the_longer_of_two_secrets_is_starred_whole() -> None:
    assert redact("abcdefgh", {"A_KEY": "abcdef", "B_KEY": "abcdefgh"}) == "***"


@given(
    st.lists(
        st.sampled_from(["aabaab", "aabaabc", "aab", "c", "://", ":", "/", "u:p", "@", "\n"]),
        max_size=12,
    ),
    st.lists(st.integers(0, 40)),
)
def test_a_text_in_pieces_is_redacted_as_a_whole(words: list[str], cuts: list[int]) -> None:
    redaction = Redaction({"A_KEY": "aabaab", "B_KEY": "aabaabc"})
    text = "".join(words)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    held = written = ""
    for start, end in zip([0, *ends], ends, strict=False):
        held += text[start:end]
        settled = redaction.settled(held)
        written, held = written + redaction(held[:settled]), held[settled:]
    assert written + redaction(held) == redaction(text)
