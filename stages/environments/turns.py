"""The tokens of an observation between two turns.

A turn that ended with the end token is a finished message. What the chat template puts between it
and the policy's next turn is read off the template once: a dialogue with a placeholder is rendered,
and what surrounds the placeholder is turned into ids. A turn that ended with a stop of the
environment's goes on in the same message, and nothing surrounds the observation.

The observation's own text is tokenised once, apart from what surrounds it, and as text: what looks
like a special token in it is not one. But it is no text's beginning, where some tokenizers put a
space. Ids that the policy sampled are never touched.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from stages.context import StageError
from stages.data.chat_templates import as_text

ASKED, ANSWERED, OBSERVED = "asked-of-the-policy", "answered-by-the-policy", "observed-by-it"
"""Placeholders that no template has in it."""


@dataclass(frozen=True)
class TurnTemplate:
    """The ids around an observation, and those of it."""

    before: Sequence[int]
    """What follows the end token of a turn, up to the observation."""
    after: Sequence[int]
    """From there to the first token of the next turn."""
    stop_ids: tuple[int, ...]
    tokenizer: Tokenizer
    """For what is no text's beginning."""
    marker: Sequence[int] = ()
    """What stands where a long observation has been cut."""
    elided: Sequence[int] = ()
    """What stands in place of an observation that has been elided."""

    def observed(self, text: str, *, same_message: bool) -> list[int]:
        """What comes after a turn; ValueError where the tokenizer cannot say the text."""
        own = _text_ids(self.tokenizer, text)
        return own if same_message else [*self.before, *own, *self.after]

    def instead(self, *, same_message: bool) -> list[int]:
        """What is read in place of an observation that has been elided: a message stays one."""
        return [*self.elided] if same_message else [*self.before, *self.elided, *self.after]

    def own(self, observed: Sequence[int]) -> Sequence[int]:
        """An observation's own ids, of those that come after a turn."""
        end = len(observed) - len(self.after)
        surrounded = len(self.before) <= end and (
            list(observed[: len(self.before)]) == list(self.before)
            and list(observed[end:]) == list(self.after)
        )
        return observed[len(self.before) : end] if surrounded else observed

    def check_room(self, limit: int) -> None:
        """StageError where nothing would be left of an observation that is cut to `limit`."""
        around = len(self.before) + len(self.after)
        if around + len(self.marker) >= limit:
            raise StageError(
                f"rollout.max_observation_tokens {limit} leaves nothing of an observation that is "
                f"cut: the chat template takes {around} of its tokens and episodes.cut_marker "
                f"{len(self.marker)}: raise it to {around + len(self.marker) + 1} or more"
            )

    def shortened(self, observed: Sequence[int], limit: int, *, same_message: bool) -> list[int]:
        """An observation of more than `limit` tokens, cut to as many: the template stays whole, and
        of its own tokens the first and the last are kept, with the marker between."""
        before, after = (0, 0) if same_message else (len(self.before), len(self.after))
        room = limit - before - after - len(self.marker)
        head = before + (room + 1) // 2
        tail = room // 2 + after
        return [*observed[:head], *self.marker, *observed[len(observed) - tail :]]


def read_turns(
    model_folder: Path, role: str, stops: Sequence[str], marker: str = "", elided: str = ""
) -> TurnTemplate:
    """For a policy's folder; StageError where its template or tokenizer does not allow turns.

    `marker` and `elided` are texts of `episodes`.
    """
    from transformers import AutoTokenizer

    rendering = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    before, after = around_observation(rendering, role)
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    within = _within_a_text(tokenizer)
    # With the end token that it follows: some swallow the line break after them.
    end, *between = _ids(tokenizer, f"{rendering.eos_token}{before}")
    if end != rendering.eos_token_id:
        between = _ids(within, before)
    words, rest = _up_to_a_token(tokenizer, after)
    around = between, [*_ids(within, words), *_ids(tokenizer, rest)]
    # From here on a text is a text.
    within.encode_special_tokens = True
    of_marker = _marker_ids(within, "cut_marker", marker)
    of_elided = _marker_ids(within, "elided_marker", elided)
    stop_ids = tuple(_stop_id(within, stop) for stop in stops)
    return TurnTemplate(*around, stop_ids, within, of_marker, of_elided)


def around_observation(tokenizer: Any, role: str) -> tuple[str, str]:
    """The text between an end token and an observation, and between that and the next turn."""
    if tokenizer.chat_template is None:
        return "", ""
    asked = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
    try:
        first = as_text(tokenizer, asked)
        both = as_text(tokenizer, [*asked, {"role": role, "content": OBSERVED}], asks=True)
    except Exception as error:
        raise StageError(
            f"the policy's chat template does not render a dialogue with the role {role!r} "
            f"({error}): give the environment another `role`, or the tokenizer another template"
        ) from error
    if any(shown.count(ANSWERED) != 1 for shown in (first, both)) or both.count(OBSERVED) != 1:
        raise StageError(
            f"the policy's chat template does not show what an assistant and the role {role!r} "
            "say as it is: give the environment another `role`, or the tokenizer another template"
        )
    prefix, _, rest = both.partition(ANSWERED)
    if first.partition(ANSWERED)[0] != prefix:
        raise StageError(
            "the policy's chat template writes earlier turns differently when the dialogue goes "
            "on, so that turns cannot be added to what was sampled: give it another template"
        )
    ended = rest.lstrip()
    if not ended.startswith(tokenizer.eos_token):
        raise StageError(
            f"the policy's chat template does not end an assistant's turn with the end token "
            f"{tokenizer.eos_token!r}, which the policy says when it is done: it puts "
            f"{rest[:20]!r} there. Make template and end token agree"
        )
    before, _, after = ended.removeprefix(tokenizer.eos_token).partition(OBSERVED)
    return before, after


def _within_a_text(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, but that it puts no space before the first word."""
    parts = json.loads(tokenizer.to_str())
    for name in ("normalizer", "pre_tokenizer"):
        parts[name] = _without_space(parts[name])
    return Tokenizer.from_str(json.dumps(parts))


def _without_space(part: Any) -> Any:
    if isinstance(part, list):
        return [kept for each in part if (kept := _without_space(each)) is not None]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return None
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: never.get(name, _without_space(value)) for name, value in part.items()}


def _up_to_a_token(tokenizer: Tokenizer, text: str) -> tuple[str, str]:
    """A text, cut before the first token that stands for itself."""
    known = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    places = [place for token in known if (place := text.find(token)) >= 0]
    first = min(places, default=len(text))
    return text[:first], text[first:]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=False).ids]


def _text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """ValueError where the tokenizer cannot say the text."""
    ids = _ids(tokenizer, text)
    unknown = getattr(tokenizer.model, "unk_token", None)
    if unknown is not None and tokenizer.token_to_id(unknown) in ids:
        raise ValueError(f"the policy's tokenizer has no tokens for all of {text!r}")
    return ids


def _marker_ids(tokenizer: Tokenizer, name: str, marker: str) -> list[int]:
    try:
        return _text_ids(tokenizer, marker)
    except ValueError as error:
        raise StageError(f"episodes.{name}: {error}") from error


def _stop_id(tokenizer: Tokenizer, stop: str) -> int:
    ids = _ids(tokenizer, stop)
    if len(ids) != 1 or tokenizer.decode(ids) != stop:
        raise StageError(
            f"the environment stops turns at {stop!r}, which is not one token of the policy's "
            "tokenizer: choose stops that are, or none, and let turns end with the end token"
        )
    return ids[0]
