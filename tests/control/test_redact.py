"""Secrets of the environment are replaced wherever text leaves a process."""

from pipelines.redact import redact

ENVIRONMENT = {
    "HF_TOKEN": "hf_abcdef123",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtn",
    "DB_PASSWORD": "hunter2222",
    "OPENAI_API_KEY": "sk-1234567",
    "HOME": "/home/somebody",
    "KEYBOARD": "qwerty-layout",
}


def test_values_of_secret_variables_are_replaced() -> None:
    text = "token hf_abcdef123 key wJalrXUtn password hunter2222 sk-1234567"
    assert redact(text, ENVIRONMENT) == "token *** key *** password *** ***"


def test_ordinary_values_stay() -> None:
    assert redact("/home/somebody qwerty-layout", ENVIRONMENT) == "/home/somebody qwerty-layout"


def test_credentials_in_addresses_are_replaced() -> None:
    assert redact("http://me:secret@host:5000/x", {}) == "http://***@host:5000/x"
