"""What an environment may answer: an observation of plain values, without secrets of the job."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stages.data.finite import is_finite
from stages.environments.environment import NoAnswer, Observation
from stages.redaction import secret_in

Reader = Callable[[Sequence[int]], str]
"""What ids say; ValueError where the policy's tokenizer does not have one."""


def checked(answer: Any, text_of: Reader | None = None) -> Observation:
    """The answer, as it is recorded and compared; NoAnswer where it is none, or raised as one."""
    if isinstance(answer, NoAnswer):
        raise answer
    if not isinstance(answer, Observation):
        raise NoAnswer(f"it answered with {type(answer).__name__}, not with an Observation")
    if not isinstance(answer.text, str):
        raise NoAnswer(f"the text of its answer is of type {type(answer.text).__name__}")
    if not is_finite(answer.reward):
        raise NoAnswer(f"its reward is {answer.reward!r}, not a finite number")
    if answer.ids is not None:
        answer = _read(answer, text_of)
    try:
        answer.text.encode()
    except UnicodeEncodeError as error:
        raise NoAnswer(f"the text of its answer cannot be encoded: {error}") from None
    if (variable := secret_in(answer.text)) is not None:
        raise NoAnswer(
            f"its answer has the value of the environment variable {variable}, which its name or "
            "its form makes a secret: leave it out of the answer, or unset it for the job"
        )
    try:
        done = bool(answer.done)
    except Exception as error:
        raise NoAnswer(f"its done is {answer.done!r}: {error}") from error
    return Observation(str(answer.text), float(answer.reward), done, answer.ids)


def read_back(kept: Mapping[str, Any]) -> Observation:
    """Of plain values, as files and other processes have them."""
    ids = kept.get("ids")
    said = (kept["text"], kept["reward"], kept["done"])
    return Observation(*said, None if ids is None else tuple(ids))


def _read(answer: Observation, text_of: Reader | None) -> Observation:
    """With the text that its ids are."""
    if text_of is None:
        raise NoAnswer("it answered with ids: only an environment that `reads_ids` may")
    try:
        ids = tuple(int(i) for i in answer.ids or ())
        return replace(answer, ids=ids, text=text_of(ids))
    except (TypeError, ValueError, OverflowError) as error:
        raise NoAnswer(f"the ids of its answer cannot be read: {error}") from None
