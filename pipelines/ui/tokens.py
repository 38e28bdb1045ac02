"""A response token by token and turn by turn, as it was sampled."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelines.ui.token_pieces import read_tokenizer

POLICY, ENVIRONMENT = "policy", "environment"


class Pieces:
    """The text of each token, for a model folder.

    Without a folder, or the package that reads its tokenizer, there are only ids.
    """

    def __init__(self, folder: Path | None) -> None:
        can_read = folder is not None and find_spec("tokenizers") is not None
        self._tokenizer: Any = read_tokenizer(folder) if folder and can_read else None

    def texts(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text before it: of a character in several tokens, the last
        one has it. Empty where there is no tokenizer."""
        if self._tokenizer is None:
            return []
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, each) or "" for each in ids]


def turns_of(
    num_tokens: int,
    mask: Sequence[int] | None,
    ends: Sequence[int],
    rewards: Sequence[float],
    credits: Sequence[float],
) -> list[dict[str, Any]]:
    """Who said which tokens, in order; a response without turns is one of the policy's.

    `rewards` is what the environment paid for each turn of the policy, `credits` what the update
    was given for it.
    """
    turns: list[dict[str, Any]] = []

    def tell(role: str, start: int, stop: int, number: int = -1) -> None:
        of = number >= 0
        turns.append({
            "role": role,
            "start": start,
            "stop": stop,
            "reward": rewards[number] if of and number < len(rewards) else None,
            "credit": credits[number] if of and number < len(credits) else None,
        })  # fmt: skip

    start = 0
    for number, last in enumerate(ends):
        begun = next((at for at in range(start, last + 1) if mask is None or mask[at]), last)
        if begun > start:
            tell(ENVIRONMENT, start, begun)
        tell(POLICY, begun, last + 1, number)
        start = last + 1
    if start < num_tokens:
        tell(ENVIRONMENT if ends else POLICY, start, num_tokens)
    return turns
