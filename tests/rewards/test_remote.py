"""Rewards from servers: a real one in a thread, which answers late, wrongly, or not at all."""

import socket
import ssl
import subprocess
import threading
import time
from contextlib import suppress

import pytest

from stages.context import Context, StageError, Stopped
from stages.rewards import remote
from tests.rewards.conftest import row
from tests.waiting import FOR_EVER_S, TIMEOUT_S, must_not_wait

ROWS = [row(str(number), index=number, level=number * 10) for number in range(5)]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)


def by_response(body, _number=0):
    return 200, {}, {"rewards": [float(response) for response in body["responses"]]}


def failure(score, server, **params) -> str:
    with pytest.raises(StageError) as caught:
        score(ROWS, kind="http", url=server.url, **params)
    return str(caught.value)


def test_batches_are_sent_and_rewards_come_in_the_order_of_the_rows(score, server) -> None:
    def slow_first(body, number):
        time.sleep(0.2 if number == 1 else 0)
        return by_response(body)

    server.answer = slow_first
    rewards = score(ROWS, kind="http", url=server.url, batch_size=2, columns=["responses", "level"])
    assert rewards == [0.0, 1.0, 2.0, 3.0, 4.0]
    bodies = sorted((body for _, _, body in server.requests), key=lambda body: body["level"])
    assert bodies[1] == {"responses": ["2", "3"], "level": [20, 30]}
    assert "Authorization" not in server.requests[0][1]


def test_what_passes_is_tried_again(score, server) -> None:
    statuses = iter([503, 429, 500, 200])

    def flaky(body, _):
        status = next(statuses)
        return (status, {}, b"busy") if status != 200 else by_response(body)

    server.answer = flaky
    assert score(ROWS, kind="http", url=server.url) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert len(server.requests) == 4


def test_waits_double_and_a_server_says_how_long(score, server, monkeypatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(remote, "_sleep", lambda seconds, _: waits.append(seconds))
    later, zoneless = "Wed, 21 Oct 2065 07:28:00 GMT", "Wed, 21 Oct 2065 07:28:00"
    answers = [
        (503, {}, b""),
        (503, {}, b""),
        (429, {"Retry-After": "7"}, b""),
        (503, {"Retry-After": later}, b""),
        (503, {"Retry-After": zoneless}, b""),
    ]
    server.answer = lambda body, n: answers[n - 1] if n <= len(answers) else by_response(body)
    assert score(ROWS, kind="http", url=server.url) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert waits == [0.01, 0.02, 7.0, *[remote.LONGEST_WAIT_S] * 2]


def test_a_server_that_stays_busy_is_named_with_the_rows(score, server) -> None:
    server.answer = lambda *_: (503, {}, b"overloaded\nsecond line")
    said = failure(score, server, retries=2, batch_size=5)
    assert "reward 'mine' for 5 rows from prompt p0, sample 0" in said
    assert f"{server.url} was asked 3 times, at last it answered 503" in said
    assert ": overloaded" in said
    assert "second line" not in said


def test_a_refusal_is_final_and_shows_its_first_line_without_the_token(
    score, server, monkeypatch
) -> None:
    monkeypatch.setenv("SCORER_WORD", "tell-nobody")
    server.answer = lambda *_: (401, {}, b"who is tell-nobody?")
    said = failure(score, server, token_variable="SCORER_WORD")
    assert "it answered 401" in said
    assert "who is ***?" in said
    assert "tell-nobody" not in said
    assert len(server.requests) == 1
    assert server.requests[0][1]["Authorization"] == "Bearer tell-nobody"


@pytest.mark.parametrize(
    "answer",
    [
        (401, {}, b"x" * 195 + b"tell-nobody"),
        (200, {}, b"who is tell-nobody?"),
        (200, {}, {"rewards": ["tell-nobody"] * 5}),
    ],
    ids=["at the end of what is shown", "no JSON", "no number"],
)
def test_no_message_has_the_token(score, server, monkeypatch, answer) -> None:
    monkeypatch.setenv("SCORER_WORD", "tell-nobody")
    server.answer = lambda *_: answer
    said = failure(score, server, token_variable="SCORER_WORD")
    assert "***" in said
    assert "tell" not in said


@pytest.mark.parametrize("token", ["tell\nnobody", "t\u00e9ll-nobody"])
def test_a_token_that_no_header_can_have_is_named_and_not_shown(
    score, server, monkeypatch, token
) -> None:
    monkeypatch.setenv("SCORER_WORD", token)
    said = failure(score, server, token_variable="SCORER_WORD")
    assert "the token in SCORER_WORD" in said
    assert "nobody" not in said


def test_a_connection_that_breaks_within_the_answer_is_tried_again(score) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    whole = b'{"rewards": [0, 1, 2, 3, 4]}'

    def answer() -> None:
        for sent in (whole[:12], whole):
            connection, _ = listener.accept()
            connection.recv(1 << 16)
            length = f"Content-Length: {len(whole)}".encode()
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n" + sent)
            connection.close()

    threading.Thread(target=answer, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    rewards = score(ROWS, kind="http", url=url, retries=1, columns=["responses"])
    assert rewards == [0.0, 1.0, 2.0, 3.0, 4.0]
    listener.close()


def test_a_token_that_is_not_set_is_named(score, server, monkeypatch) -> None:
    monkeypatch.delenv("SCORER_WORD", raising=False)
    said = failure(score, server, token_variable="SCORER_WORD")
    assert "rewards.mine.token_variable names SCORER_WORD, which is not set" in said
    assert not server.requests


def test_a_redirection_does_not_get_the_token(score, server, monkeypatch) -> None:
    monkeypatch.setenv("SCORER_WORD", "tell-nobody")
    server.answer = lambda *_: (302, {"Location": server.url + "/elsewhere"}, b"")
    assert "which is not followed" in failure(score, server, token_variable="SCORER_WORD")
    assert [path for path, _, _ in server.requests] == ["/"]


def test_a_server_that_is_too_slow_is_named(score, server) -> None:
    enough, waited = threading.Event(), []
    server.answer = lambda *_: (waited.append(enough.wait(TIMEOUT_S)), (200, {}, {}))[1]
    assert "did not answer within 0.3 s" in failure(score, server, timeout=0.3, retries=1)
    assert not waited
    enough.set()


OK = b"HTTP/1.1 200 OK\r\n"


@must_not_wait
@pytest.mark.parametrize(
    ("begin", "drip"),
    [
        (OK + b"Content-Length: 1000000\r\n\r\n", b" "),
        (OK + b"X-Wait: ", b"."),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n1;extension=", b"."),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 1000000\r\n\r\n", b" "),
    ],
    ids=["body", "header", "100 Continue", "chunk extension", "chunks", "body of an error"],
)
def test_a_server_that_dribbles_is_too_slow(score, begin, drip) -> None:
    """Each piece comes in time, the whole does not: for as long as anybody listens."""
    listener = socket.create_server(("127.0.0.1", 0))
    given_up = threading.Event()

    def dribble() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(begin)
            while True:
                connection.sendall(drip)
                time.sleep(0.01)
        given_up.set()

    threading.Thread(target=dribble, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(StageError, match=r"did not answer within 0\.3 s|it answered 503 Busy"):
        score(ROWS, kind="http", url=url, timeout=0.3, retries=0)
    # Whoever had no time even to connect leaves the server waiting.
    socket.create_connection(listener.getsockname()).close()
    assert given_up.wait(TIMEOUT_S), "the connection is closed"
    listener.close()


@must_not_wait
def test_a_server_with_tls_answers_or_dribbles(score, tmp_path, monkeypatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 "
    words += f"-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 -keyout {key} "
    subprocess.run([*words.split(), "-out", certificate], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))
    answer = OK + b'Content-Length: 28\r\n\r\n{"rewards": [0, 1, 2, 3, 4]}'
    drips = iter([b"", b"."])

    def serve() -> None:
        for drip in drips:
            connection = context.wrap_socket(listener.accept()[0], server_side=True)
            with connection, suppress(OSError):
                while not connection.recv(1 << 16).endswith(b"}"):
                    pass
                connection.sendall(OK + b"X-Wait: " if drip else answer)
                while drip:
                    connection.sendall(drip)
                    time.sleep(0.01)

    threading.Thread(target=serve, daemon=True).start()
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    assert score(ROWS, kind="http", url=url, retries=0) == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(StageError, match=r"did not answer within 1 s"):
        score(ROWS, kind="http", url=url, timeout=1.0, retries=0)
    listener.close()


@must_not_wait
def test_a_server_that_never_agrees_on_keys_is_too_slow(score) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def dribble() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(b"\x16\x03\x03\x40\x00")  # the beginning of a long record
            while True:
                connection.sendall(b"\x02")
                time.sleep(0.01)

    threading.Thread(target=dribble, daemon=True).start()
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(StageError, match=r"did not answer within 0\.3 s"):
        score(ROWS, kind="http", url=url, timeout=0.3, retries=0)
    listener.close()


def test_nobody_at_home_is_named(score) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(StageError, match="there was no connection"):
        score(ROWS, kind="http", url=url, retries=1)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"rewards": [1, 2]}, "answered 2 rewards for 5 responses: 5 rows from prompt p0"),
        ({"scores": [1] * 5}, 'answered no {"rewards": [...]}'),
        ([1] * 5, 'answered no {"rewards": [...]}'),
        ({"rewards": [1, 1, "x", 1, 1]}, "answered 'x', not a number, for prompt p1, sample 0"),
        ({"rewards": [1, None, 1, 1, 1]}, "answered None, not a number, for prompt p0, sample 1"),
        (b'{"rewards": [1, 1, 1, 1, NaN]}', "answered nan for prompt p2, sample 0"),
        (b"<html>", "answered no JSON"),
        (b"[" * 200_000, "answered no JSON"),
        (b'{"rewards": [1, 1, 1' + b"0" * 400 + b", 1, 1]}", "0000 for prompt p1, sample 0"),
    ],
)
def test_wrong_answers_are_refused(score, server, answer, said) -> None:
    server.answer = lambda *_: (200, {}, answer)
    assert said in failure(score, server, batch_size=5)


def test_a_column_that_no_row_has_is_named(score, server) -> None:
    said = failure(score, server, columns=["responses", "weather"])
    assert "rewards.mine.columns names weather, which no row has; there are prompts" in said


@must_not_wait
def test_stopping_does_not_wait_for_a_busy_server(ctx: Context, score, server, monkeypatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT_S", FOR_EVER_S)

    def busy(*_):
        ctx.request_stop()
        return 503, {}, b""

    server.answer = busy
    with pytest.raises(Stopped):
        score(ROWS, kind="http", url=server.url)
