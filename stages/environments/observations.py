"""What an environment may answer: an observation of plain values, without secrets of the job."""

from typing import Any

from stages.data.finite import is_finite
from stages.environments.environment import NoAnswer, Observation
from stages.redaction import secret_in


def checked(answer: Any) -> Observation:
    """The answer, as it is recorded and compared; NoAnswer where it is none, or raised as one."""
    if isinstance(answer, NoAnswer):
        raise answer
    if not isinstance(answer, Observation):
        raise NoAnswer(f"it answered with {type(answer).__name__}, not with an Observation")
    if not isinstance(answer.text, str):
        raise NoAnswer(f"the text of its answer is of type {type(answer.text).__name__}")
    if not is_finite(answer.reward):
        raise NoAnswer(f"its reward is {answer.reward!r}, not a finite number")
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
        return Observation(str(answer.text), float(answer.reward), bool(answer.done))
    except Exception as error:
        raise NoAnswer(f"its done is {answer.done!r}: {error}") from error
