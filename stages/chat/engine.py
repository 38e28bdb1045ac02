"""The process of a policy that answers: it reads lines of JSON, and tells what it says in others.

The first line names the policy, {"folder": path, "engine": name, "precision": name}, and is
answered by {"ready": facts}. Each line after it asks, {"ask": id, "messages": [...], "seed": number
or null, "max_new_tokens": n, "sampling": {...}}, or ends an answer early, {"stop": id}. What is
asked is answered in its order, by any number of {"id": id, "said": text} and one {"id": id,
"answer": {...}}, or by {"id": id, "refused": reason}; the first line may be refused, too.

It ends when nobody can ask any more: with its parent. What libraries print goes to its log.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from stages.engines.processes import determinism


class Orders:
    """What is asked, read beside the answering: so an answer can be stopped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._asked: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._stopped: set[Any] = set()
        Thread(target=self._read, daemon=True).start()

    def next(self) -> dict[str, Any]:
        return self._asked.get()

    def is_stopped(self, name: Any) -> bool:
        return name in self._stopped

    def done(self, name: Any) -> None:
        self._stopped.discard(name)

    def _read(self) -> None:
        for line in self._stream:
            order = json.loads(line)
            if "stop" in order:
                self._stopped.add(order["stop"])
            else:
                self._asked.put(order)
        os._exit(0)


def main() -> None:
    orders, answers = _private_pipes()

    def tell(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    determinism.before_import()
    serve(Orders(orders), tell)


def serve(orders: Orders, tell: Callable[..., None]) -> None:
    # After determinism.before_import: this imports torch.
    import torch

    from stages.chat.policy import ChatPolicy
    from stages.context import StageError
    from stages.contracts.precision import Precision
    from stages.contracts.rollout import Engine

    determinism.after_import()
    order = orders.next()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        engine, precision = Engine(order["engine"]), Precision(order["precision"])
        policy = ChatPolicy(Path(order["folder"]), engine, precision, device)
    except StageError as error:
        tell(refused=str(error))
        return
    facts = ("policy_hash", "context", "engine", "device")
    tell(ready={name: getattr(policy, name) for name in facts})
    while True:
        _answer(policy, orders.next(), orders, tell)


def _answer(
    policy: Any, order: Mapping[str, Any], orders: Orders, tell: Callable[..., None]
) -> None:
    from stages.context import StageError
    from stages.engines.generation.generator import Sampling

    name = order["ask"]
    try:
        answer = policy.answer(
            order["messages"],
            seed=order["seed"],
            max_new_tokens=order["max_new_tokens"],
            sampling=Sampling(**order["sampling"]),
            said=lambda text: tell(id=name, said=text),
            is_stopped=lambda: orders.is_stopped(name),
        )
        tell(id=name, answer=answer.as_json())
    except StageError as error:
        tell(id=name, refused=str(error))
    finally:
        orders.done(name)


def _private_pipes() -> tuple[Any, Any]:
    """Ours alone: libraries find an empty input, and what they print goes to the log."""
    orders = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(sys.stderr.fileno(), 1)
    return orders, answers


if __name__ == "__main__":
    main()
