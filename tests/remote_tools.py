"""Tools behind a real HTTP server on this machine, and an environment that asks them."""

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

Request = Mapping[str, Any]
Answer = Callable[[Request], Mapping[str, Any] | None]
"""To a request; None: an error of the server."""
REMOTE = '''
import json
import os
from pathlib import Path
from urllib.request import urlopen

from stages.environments.environment import Environment, Observation


class Remote(Environment):
    """Asks a server, whose address is in a file."""

    stops = (";",)

    def reset(self, row, seed):
        self.asked = {"prompt": row["prompt_id"], "seed": seed, "actions": []}
        self.ask()

    def step(self, action):
        self.asked["actions"].append(action)
        return Observation(**self.ask())

    def ask(self):
        url = (Path(__file__).parent.parent / "url").read_text()
        with urlopen(url, json.dumps(self.asked).encode(), timeout=900) as answer:
            return json.load(answer)


class Leaks(Remote):
    def step(self, action):
        return Observation("1" + os.environ["OF_TESTS_API_KEY"])


class RaisesIt(Remote):
    def step(self, action):
        raise OSError("401: the key " + os.environ["OF_TESTS_API_KEY"] + " is not valid \\ud800")


class Torn(Remote):
    def step(self, action):
        return Observation("\\ud800")
'''


class Server:
    """Tools behind HTTP; `asked` has every request."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[Request] = []
        asked, lock = self.asked, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    asked.append(request)
                    said = answer(request)
                self.send_response(200 if said else 500)
                self.end_headers()
                self.wfile.write(json.dumps(said).encode())

            def log_message(self, *_: object) -> None:
                pass

        class Http(ThreadingHTTPServer):
            request_queue_size = 128

        self._http = Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def by_rule(request: Request) -> dict[str, Any]:
    """A function of the request."""
    actions = request["actions"]
    text = f"{(len(''.join(actions)) + request['seed']) % 10}="
    return {"text": text, "reward": len(actions) / 7, "done": len(actions) > 2}


def by_turn() -> Answer:
    """Another answer each time, whoever asks what."""
    numbers = count(1)

    def answer(_: Request) -> dict[str, Any]:
        number = next(numbers)
        return {"text": f"{number % 100}=", "reward": number / 7, "done": number % 5 == 0}

    return answer
