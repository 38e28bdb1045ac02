"""A conversation in a terminal, with one policy or two that are asked the same.

Ctrl-C ends an answer and not the conversation; Ctrl-D ends that. Each policy goes on from what it
has said itself. What a policy says is text: characters that steer a terminal are made visible.
"""

import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from pipelines.base.errors import LockstepError
from pipelines.chat.dialogue import Answer, Message, Options
from pipelines.chat.engine import Engine
from stages.reporting.markup import printable

HELP = """\
  /reset          begin a new conversation; the system prompt stays
  /system TEXT    another system prompt, and a new conversation; without TEXT: none
  /seed N         draw with another seed; without N: say which it is
  /help           this list
Ctrl-C ends an answer, Ctrl-D the chat."""


@dataclass
class Conversation:
    """With each policy what was said so far."""

    engines: Sequence[Engine]
    options: Options
    system: str | None = None
    _said: list[list[Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        start = [{"role": "system", "content": self.system}] if self.system else []
        self._said = [list(start) for _ in self.engines]

    def messages(self, index: int, text: str) -> list[Message]:
        """What this policy is asked."""
        return [*self._said[index], {"role": "user", "content": text}]

    def note(self, index: int, text: str, answer: Answer) -> None:
        turn: list[Message] = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": answer.text},
        ]
        self._said[index] += turn


def chat(conversation: Conversation) -> None:
    """Until Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401 - lines can be edited, and earlier ones fetched
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends the chat)")
            continue
        try:
            if line.startswith("/"):
                print(_command(conversation, line))
            elif line:
                _ask(conversation, line)
        except LockstepError as error:
            print(f"lockstep: {error}", file=sys.stderr)


def ask_once(conversation: Conversation, text: str, *, quiet: bool = False) -> list[Answer]:
    """Every policy's answer to one question, printed unless `quiet`."""
    return [_stream(conversation, index, text, quiet) for index in range(len(conversation.engines))]


def one_shot_json(conversation: Conversation, text: str, answers: list[Answer]) -> dict[str, Any]:
    """The answers with all that they are a function of."""
    return {
        "options": vars(conversation.options),
        "answers": [
            {
                "policy": engine.policy.name,
                "commit": engine.policy.commit,
                "artifact": engine.policy.artifact.hash,
                "policy_hash": engine.policy_hash,
                "messages": conversation.messages(index, text),
                **vars(answer),
            }
            for index, (engine, answer) in enumerate(
                zip(conversation.engines, answers, strict=True)
            )
        ],
    }


def _ask(conversation: Conversation, text: str) -> None:
    for index, answer in enumerate(ask_once(conversation, text)):
        conversation.note(index, text, answer)


def _stream(conversation: Conversation, index: int, text: str, quiet: bool) -> Answer:
    engine = conversation.engines[index]
    if len(conversation.engines) > 1 and not quiet:
        print(f"[{engine.policy.name}]")
    name = uuid.uuid4().hex
    asked = conversation.messages(index, text), conversation.options
    with _stopped_by_ctrl_c(engine, name):
        for part in engine.answer(*asked, name):
            if isinstance(part, Answer):
                answer = part
            elif not quiet:
                print(printable(part), end="", flush=True)
    if not quiet:
        end = {"length": " [cut off]", "stopped": " [stopped]"}.get(answer.finish_reason, "")
        print(end if answer.text else f"(empty){end}")
    return answer


def _command(conversation: Conversation, line: str) -> str:
    """Do it; what to say of it."""
    name, _, value = line.partition(" ")
    value = value.strip()
    if name == "/reset":
        conversation.reset()
        return "a new conversation"
    if name == "/system":
        conversation.system = value or None
        conversation.reset()
        return "a new conversation, " + ("with that system prompt" if value else "with none")
    if name == "/seed":
        if value:
            conversation.options = conversation.options.changed(seed=_number(value))
        return f"seed {conversation.options.seed}"
    if name == "/help":
        return HELP
    raise LockstepError(f"{name} is no command of the chat:\n{HELP}")


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise LockstepError(f"/seed {text}: the seed is a whole number from 0 up") from None


@contextmanager
def _stopped_by_ctrl_c(engine: Engine, name: str) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, lambda *_: engine.stop(name))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
