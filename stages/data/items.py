"""The rows of each role before they are rendered: texts, each with the place to point at."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from stages.contracts.prepare import Turns
from stages.contracts.sources import Role
from stages.data.artifacts import canonical_json
from stages.data.dialogue import Dialogue, Message, digest, is_plain, normalised, reply, spoken
from stages.data.formats.rows import Given
from stages.data.row_error import RowError


@dataclass(frozen=True)
class Place:
    """Where a row was read: a file, or a dataset, and the number of its line or row."""

    source: str
    line: int
    counted: str = "row"

    def __str__(self) -> str:
        return f"{self.source} {self.counted} {self.line}"


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt, and its right answer where there is one."""

    place: Place
    prompt: Dialogue
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else the source says of it."""
    copies: int = 1
    """How often it is written."""

    def responses(self) -> Sequence[Sequence[Message]]:
        """All that is said in answer to the prompt."""
        return ()

    def supervision(self) -> Sequence[Any]:
        """Margin, rating or labels: they tell apart rows of the same prompt and responses."""
        return ()

    @cached_property
    def digest(self) -> bytes:
        """What makes it the row that it is, in 128 bits."""
        return digest(canonical_json([self.prompt.content, *self.responses(), *self.supervision()]))

    @property
    def row_id(self) -> str:
        """A short name of the same, stable over runs and machines."""
        return self.digest.hex()[:16]

    @property
    def normalised_digest(self) -> bytes:
        """The same for rows that differ in what `normalised` hides alone."""
        words = [_words(self.prompt.messages), *map(_words, self.responses())]
        return digest(canonical_json([*words, self.prompt.tools, *self.supervision()]))

    @property
    def prompt_digest(self) -> bytes:
        """The same for prompts that differ in these alone, or in what the system is told."""
        return _asked(self.prompt.messages)

    def answered_digests(self) -> Iterator[bytes]:
        """The `prompt_digest` of all that it says an answer to."""
        yield self.prompt_digest

    def texts(self) -> Iterator[str]:
        """Every text in it."""
        yield self.answer or ""
        for messages in (self.prompt.messages, *self.responses()):
            yield from (message["content"] for message in messages)


@dataclass(frozen=True, kw_only=True)
class Demonstration(Example):
    """A prompt with the turns that follow it; the assistant's are to be imitated."""

    completion: Sequence[Message]
    plain_text: bool = False
    """Whether it is a text with no prompt and no turns, all of it to be imitated."""

    def responses(self) -> Sequence[Sequence[Message]]:
        return (self.completion,)

    def answered_digests(self) -> Iterator[bytes]:
        for index, message in enumerate(self.completion):
            if message["role"] == "assistant":
                yield _asked((*self.prompt.messages, *self.completion[:index]))


@dataclass(frozen=True, kw_only=True)
class Pair(Example):
    """Two responses to a prompt, the first preferred."""

    chosen: Message
    rejected: Message
    margin: float | None = None
    """By how much the first is better, where the source says so."""

    def responses(self) -> Sequence[Sequence[Message]]:
        return ((self.chosen,), (self.rejected,))

    def supervision(self) -> Sequence[Any]:
        return (self.margin,)


@dataclass(frozen=True, kw_only=True)
class Rated(Example):
    """A response with a rating."""

    completion: Message
    rating: float

    def responses(self) -> Sequence[Sequence[Message]]:
        return ((self.completion,),)

    def supervision(self) -> Sequence[Any]:
        return (self.rating,)


@dataclass(frozen=True, kw_only=True)
class Labelled(Example):
    """A response in steps, each right (1) or wrong (0)."""

    steps: Sequence[str]
    labels: Sequence[float]

    def responses(self) -> Sequence[Sequence[Message]]:
        return (list(map(reply, self.steps)),)

    def supervision(self) -> Sequence[Any]:
        return tuple(self.labels)


def _asked(messages: Sequence[Message]) -> bytes:
    return digest(canonical_json(_words([m for m in messages if m["role"] != "system"])))


def _words(messages: Sequence[Message]) -> list[list[str]]:
    return [[message["role"], normalised(spoken(message))] for message in messages]


def items_of(
    role: Role, given: Given, place: Place, turns: Turns = Turns.ALL, most_pairs: int = 0
) -> Iterator[Example]:
    """The rows of a role that one row of a source gives; RowError where it gives none."""
    common: dict[str, Any] = {"place": place, "answer": given.answer, "extra": given.extra}
    pairs = given.pairs[:most_pairs] if most_pairs else given.pairs
    match role:
        case Role.PROMPTS | Role.HELD_OUT:
            messages = given.before
            # What the assistant says last, if it ends the dialogue, is not part of the prompt.
            if messages and messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            yield Example(prompt=_prompt(messages, given), **common)
        case Role.DEMONSTRATIONS if given.text is not None:
            if not given.text:
                raise RowError("'text' is empty: write some or drop the row")
            words = [reply(given.text)]
            yield Demonstration(prompt=Dialogue(()), completion=words, plain_text=True, **common)
        case Role.DEMONSTRATIONS if pairs:
            better, _ = pairs[0]
            yield _demonstration((*given.before, *better), given, common, Turns.LAST)
        case Role.DEMONSTRATIONS:
            yield _demonstration(given.dialogue().messages, given, common, turns)
        case Role.PREFERENCES | Role.HELD_OUT_PREFERENCES:
            for better, worse in pairs:
                yield Pair(
                    prompt=_prompt(given.before, given),
                    chosen=_turn(better),
                    rejected=_turn(worse),
                    margin=given.margin,
                    **common,
                )
        case Role.FEEDBACK if given.pairs:
            for better, worse in pairs:
                prompt = _prompt(given.before, given)
                yield Rated(prompt=prompt, completion=_turn(better), rating=1.0, **common)
                yield Rated(prompt=prompt, completion=_turn(worse), rating=0.0, **common)
        case Role.FEEDBACK:
            *before, last = given.dialogue().messages
            yield Rated(
                prompt=_prompt(before, given),
                completion=_turn([last]),
                rating=given.rating or 0.0,
                **common,
            )
        case Role.STEPS:
            prompt = _prompt(given.before, given)
            yield Labelled(prompt=prompt, steps=given.steps, labels=given.labels, **common)


def _demonstration(
    messages: Sequence[Message], given: Given, common: Mapping[str, Any], turns: Turns
) -> Demonstration:
    """Turns from the first of the assistant to its last; what follows is nothing to imitate."""
    speaking = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not speaking:
        raise RowError("the assistant says nothing: there is nothing to imitate")
    last = speaking[-1]
    first = speaking[0] if turns is Turns.ALL else last
    prompt = _prompt(messages[:first], given)
    if any(is_plain(messages[i]) and not messages[i]["content"] for i in speaking if i >= first):
        raise RowError("the assistant's response is empty: there is nothing to imitate")
    return Demonstration(prompt=prompt, completion=messages[first : last + 1], **common)


def _prompt(messages: Sequence[Message], given: Given) -> Dialogue:
    if not messages:
        raise RowError("there is no prompt before what the assistant says")
    if messages[-1]["role"] == "assistant":
        raise RowError("the prompt ends with what the assistant says: there is nothing to answer")
    return Dialogue(tuple(messages), given.tools)


def _turn(messages: Sequence[Message]) -> Message:
    """A response of one turn."""
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise RowError("a response is one turn of the assistant")
    return messages[0]
