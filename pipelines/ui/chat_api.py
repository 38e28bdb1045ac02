"""The Chat page: one policy or two that answer, and the preference between their answers.

An answer comes as lines of JSON, one as soon as it is known: {"state": "loading"}, {"said": text},
and at the end {"answer": ...} or {"error": message}. A preference names two answers that this
server has given; what it is saved with is what they were made of here, not what a page says.
"""

import getpass
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from pipelines.annotations.judgement import Choice, Judgement, Origin, Response
from pipelines.annotations.pair import pair_id
from pipelines.annotations.store import append
from pipelines.base.errors import LockstepError
from pipelines.base.owners import explain
from pipelines.chat.dialogue import Answer, Message, Options
from pipelines.chat.engine import Engine
from pipelines.chat.policies import Policy, find_policy, finished_policies
from pipelines.chat.pool import Engines
from pipelines.config.params import load_params
from pipelines.lineage.run_index import gather
from pipelines.ui.clone import Clone

MOST_ANSWERS = 1000
"""So many are remembered, for preferences between them."""
AnswerId = Annotated[str, StringConstraints(pattern=r"^[0-9a-zA-Z-]{8,64}$")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Said(_Body):
    role: Literal["system", "user", "assistant"]
    content: str


class Wanted(_Body):
    """How the answer is drawn; what is not said is as in rollouts."""

    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None


class Asked(_Body):
    id: AnswerId
    policy: str
    messages: Annotated[list[Said], Field(min_length=1)]
    options: Wanted = Wanted()


class Stopped(_Body):
    id: AnswerId


class Preferred(_Body):
    left: AnswerId
    right: AnswerId
    chosen: Literal["left", "right", "tie"]
    annotator: str
    note: str = ""


@dataclass(frozen=True)
class Given:
    """An answer that was given, and what it was made of."""

    policy: str
    policy_hash: str
    messages: tuple[Message, ...]
    options: Options
    answer: Answer | None = None
    """None: it is under way."""

    def as_response(self) -> Response:
        answer = self.answer
        if answer is None:
            raise LockstepError(f"{self.policy} is still answering: wait for it, or stop it")
        sampling = asdict(self.options)
        drawn = sampling.pop("seed") if sampling["temperature"] else None
        return Response(
            text=answer.text,
            policy=self.policy,
            policy_hash=self.policy_hash,
            seed=answer.seed if drawn is not None else None,
            sampling=sampling,
            finish_reason=answer.finish_reason,
        )


class Conversations:
    """The answers of this server: those under way, and the last ones that were given."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._lock = threading.Lock()
        self._given: dict[str, Given] = {}
        self._under_way: dict[str, Callable[[], None]] = {}
        self._stopped: set[str] = set()

    def begin(self, name: str, given: Given) -> None:
        with self._lock:
            if name in self._given:
                raise LockstepError(f"there is an answer {name} already: give this one another id")
            self._given[name] = given
            for old in list(self._given)[:-MOST_ANSWERS]:
                if old not in self._under_way:
                    del self._given[old]

    def answer(self, name: str, policy: Policy) -> Iterator[str | Answer]:
        """The answer that was begun, piece by piece."""
        given = self._given[name]
        try:
            with self._engines.lent(policy) as engine:
                self._started(name, engine)
                for part in engine.answer(given.messages, given.options, name):
                    if isinstance(part, Answer):
                        self._given[name] = replace(
                            given, answer=part, policy_hash=engine.policy_hash
                        )
                    yield part
        finally:
            with self._lock:
                self._under_way.pop(name, None)
                self._stopped.discard(name)
                if self._given[name].answer is None:
                    del self._given[name]

    def stop(self, name: str) -> None:
        with self._lock:
            if name not in self._given or self._given[name].answer is not None:
                return
            self._stopped.add(name)
            stop = self._under_way.get(name)
        if stop is not None:
            stop()

    def given(self, name: str) -> Given:
        if name not in self._given:
            raise LockstepError(
                "this server does not know that answer (any more): ask again, and judge the new one"
            )
        return self._given[name]

    def _started(self, name: str, engine: Engine) -> None:
        with self._lock:
            self._under_way[name] = lambda: engine.stop(name)
            is_stopped = name in self._stopped
        if is_stopped:
            engine.stop(name)


def router(clone: Clone) -> APIRouter:
    engines = Engines(clone.repository)
    conversations = Conversations(engines)

    @asynccontextmanager
    async def until_the_end(_app: Any) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(engines.close)

    api = APIRouter(lifespan=until_the_end)

    @api.get("")
    def about() -> dict[str, Any]:
        """Whom one can ask, and how they are asked unless one says otherwise."""
        options = Options.of_rollout(load_params(clone.root))
        return {
            "policies": finished_policies(gather(clone.repository)),
            "loaded": engines.names(),
            "defaults": asdict(options),
            "annotator": _user(),
        }

    @api.post("/answer")
    def answer(asked: Asked) -> StreamingResponse:
        policy = find_policy(clone.repository, asked.policy)
        options = Options.of_rollout(load_params(clone.root))
        options = options.changed(**asked.options.model_dump())
        messages = tuple(message.model_dump() for message in asked.messages)
        conversations.begin(asked.id, Given(asked.policy, "", messages, options))
        lines = _lines(conversations.answer(asked.id, policy))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    @api.post("/stop")
    def stop(asked: Stopped) -> dict[str, Any]:
        conversations.stop(asked.id)
        return {"stopped": asked.id}

    @api.post("/preference")
    def preference(preferred: Preferred) -> dict[str, Any]:
        left, right = conversations.given(preferred.left), conversations.given(preferred.right)
        if left.messages != right.messages:
            raise LockstepError(
                "the two were not asked the same: only answers to one conversation can be compared"
            )
        one, other = left.as_response(), right.as_response()
        judgement = Judgement(
            messages=left.messages,
            left=one,
            right=other,
            chosen=Choice(preferred.chosen),
            annotator=preferred.annotator,
            # As in the queue: whoever judged these texts there is not heard twice.
            origin=Origin(place="chat", pair=pair_id(left.messages, (), one.text, other.text)),
            note=preferred.note,
        )
        return {"id": append(clone.root, judgement).id}

    return api


def _user() -> str:
    """Who is likely to judge."""
    with suppress(KeyError, OSError):  # a user without a name, as in some containers
        return getpass.getuser()
    return ""


def _lines(parts: Iterator[str | Answer]) -> Iterator[str]:
    yield _line({"state": "loading"})
    try:
        for part in parts:
            yield _line({"answer": asdict(part)} if isinstance(part, Answer) else {"said": part})
    except LockstepError as error:
        yield _line({"error": str(error)})
    except OSError as error:
        yield _line({"error": explain(error)})


def _line(message: Mapping[str, Any]) -> str:
    return json.dumps(message) + "\n"
