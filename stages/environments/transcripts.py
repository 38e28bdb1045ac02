"""Episodes to read: turn by turn, what the policy said and what it was answered."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.data.dialogue import transcript
from stages.data.tokenizer import Decoder
from stages.engines.generation.generator import Completion
from stages.environments.loading import find
from stages.environments.turns import TurnTemplate, read_turns

POLICY, ENVIRONMENT = "assistant", "environment"


def transcripts(
    completions: Sequence[Completion], environment: str, folder: Path, policy: Path
) -> list[str]:
    """A text for each episode; of a single turn, its words."""
    kind, decoder = find(environment, folder), Decoder(policy)
    turns = read_turns(policy, kind.role, kind.stops)
    return [_transcript(completion, turns, decoder) for completion in completions]


def _transcript(completion: Completion, turns: TurnTemplate, decoder: Decoder) -> str:
    ids, mask = completion.ids, completion.loss_mask or []
    told: list[dict[str, Any]] = []

    def tell(role: str, start: int, end: int) -> None:
        part = ids[start:end]
        shown = turns.own(part) if role == ENVIRONMENT else part
        told.append({"role": role, "content": decoder.text(shown).strip()})

    start = 0
    for last in completion.turn_ends or []:
        begun = mask.index(1, start)
        if begun > start:
            tell(ENVIRONMENT, start, begun)
        tell(POLICY, begun, last + 1)
        start = last + 1
    if start < len(ids):
        tell(ENVIRONMENT, start, len(ids))
    return transcript(told) if len(told) > 1 else decoder.text(ids)
