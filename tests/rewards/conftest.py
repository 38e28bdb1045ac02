"""What tests of reward sources share: rows, a context, and a real HTTP server in a thread."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from stages.context import Context
from stages.contracts.rewards import AnySource
from stages.rewards.given import given
from stages.rewards.isolated import Workers
from stages.rewards.named import FRESH_WORKERS, NamedSource, open_scorer


def row(response: str = "4", answer: str | None = "4", index: int = 0, **columns: Any) -> dict:
    """A row of rollouts; `columns` are those of the source that have no meaning of their own."""
    return {
        "prompt_id": f"p{index // 2}",
        "sample_index": index % 2,
        "greedy": False,
        "prompt": f"What is 2 + 2, for the {index}th time?",
        "response": response,
        "answer": answer,
        "response_ids": list(range(len(response))),
        "finish_reason": "stop",
        "extra": json.dumps(columns),
    }


def scored(
    ctx: Context, rows: list[dict], folder: Path, workers: Workers = FRESH_WORKERS, **params: Any
) -> list[float]:
    """The rewards of rows by a source called `mine`."""
    source = NamedSource("mine", TypeAdapter(AnySource).validate_python(params), folder)
    plain = [given(item) for item in rows]
    scorer = open_scorer(ctx, source, plain, workers)
    try:
        return scorer.score(plain)
    finally:
        scorer.close()


@pytest.fixture
def ctx(tmp_path: Path) -> Context:
    folder = tmp_path / "job"
    folder.mkdir()
    return Context(stage="score@iter_001", key="iter_001", seed=1, folder=folder)


@pytest.fixture
def functions(tmp_path: Path) -> Callable[..., Path]:
    """A folder with these modules."""

    def write(**modules: str) -> Path:
        folder = tmp_path / "rewards"
        folder.mkdir(exist_ok=True)
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        return folder

    return write


@pytest.fixture
def score(ctx: Context, tmp_path: Path) -> Callable[..., list[float]]:
    """The rewards of rows by a source: `score(rows, folder, kind=..., ...)`."""

    def run(rows: list[dict], folder: Path = tmp_path, **params: Any) -> list[float]:
        return scored(ctx, rows, folder, **params)

    return run


class Server:
    """Answers every POST by `answer(body, number) -> (status, headers, body)`; remembers it."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.answer: Callable[[Any, int], tuple[int, dict[str, str], Any]]
        owner, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    owner.requests.append((self.path, dict(self.headers), body))
                    number = len(owner.requests)
                status, headers, answer = owner.answer(body, number)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # whoever asked waits no more

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()
