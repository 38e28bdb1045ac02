"""judge: a language model behind an OpenAI-compatible endpoint is asked for a number.

It is asked at temperature 0, one request a response. The number is a field of the last JSON object
in its answer, or the last number of the text (8/10, "8 out of 10" and "8 on a scale from 0 to 10"
are 8 where 10 is the highest); it has to lie between `low` and `high`. An answer that was cut at
`max_tokens` has none, whatever numbers it had come to. What it answered is kept in the scratch by a
hash of the request, so that a stage that was killed does not ask again. A model that somebody
serves may answer another way tomorrow: the scores keep what it said today.
"""

import hashlib
import json
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.context import Context, StageError
from stages.contracts.rewards import TEMPLATE_NAMES, Judge
from stages.rewards.given import Row, name_of, other_columns
from stages.rewards.remote import NoAnswer, Server
from stages.rewards.side_by_side import BatchScorer

_HOLE = re.compile(r"\{(\w+)\}")
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?(?![\w])")
SHOWN = 200


class JudgeScorer(BatchScorer):
    def __init__(
        self, ctx: Context, name: str, params: Judge, folder: Path, rows: Sequence[Row]
    ) -> None:
        super().__init__(ctx, params.concurrency)
        self._name, self._params = name, params
        self._server = Server(name, params, "/chat/completions")
        self._template = read_template(name, params, folder)
        known = [*TEMPLATE_NAMES, *other_columns(rows)]
        if unknown := [hole for hole in _HOLE.findall(self._template) if hole not in known]:
            raise StageError(
                f"the template of rewards.{name} has {{{unknown[0]}}}, which no row has; there are "
                f"{', '.join(known)}"
            )

    def _of_batch(self, batch: Sequence[Row]) -> list[float]:
        return [self._of_row(row) for row in batch]

    def _of_row(self, row: Row) -> float:
        reply, cut = self._answer(row)
        number = None if cut else parse(reply, self._params)
        if number is not None:
            return number
        if self._params.on_unparsable is None and cut:
            raise StageError(
                f"reward {self._name!r} for {name_of(row)}: the judge's answer was cut after "
                f"rewards.{self._name}.max_tokens, {self._params.max_tokens}: {reply[-SHOWN:]!r}. "
                "Raise it, ask for a shorter answer, or say what such an answer is worth: "
                f"rewards.{self._name}.on_unparsable"
            )
        if self._params.on_unparsable is None:
            raise StageError(
                f"reward {self._name!r} for {name_of(row)}: the judge's answer has no number from "
                f"{self._params.low:g} to {self._params.high:g}: {reply[-SHOWN:]!r}. Ask more "
                f"clearly, or say what such an answer is worth: rewards.{self._name}.on_unparsable"
            )
        return self._params.on_unparsable

    def _answer(self, row: Row) -> tuple[str, bool]:
        """The judge's reply, and whether it was truncated."""
        message = request(self._params, self._template, row)
        asked = json.dumps([self._server.url, message], sort_keys=True)
        digest = hashlib.sha256(asked.encode()).hexdigest()
        kept = self._ctx.scratch / "judge" / self._name / f"{digest}.json"
        if (known := _recall(kept)) is not None:
            return known
        try:
            answer = self._server.ask(message, self._given_up.is_set)
            choice = answer["choices"][0]
            reply, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
            if not isinstance(reply, str | None):
                raise TypeError(reply)
        except NoAnswer as problem:
            raise StageError(f"reward {self._name!r} for {name_of(row)}: {problem}") from None
        except (KeyError, IndexError, TypeError, AttributeError):
            shown = self._server.shown(json.dumps(answer))
            raise StageError(
                f"reward {self._name!r} for {name_of(row)}: {self._server.url} answered no chat "
                f"completion: {shown}"
            ) from None
        reply = reply or ""
        _keep(kept, reply, cut)
        return reply, cut


def read_template(name: str, params: Judge, folder: Path) -> str:
    """The prompt template of a judge; StageError where it is missing or has no response."""
    if params.template is not None:
        return params.template
    path = folder / str(params.file)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StageError(f"the template of rewards.{name} cannot be read: {error}") from None
    if "{response}" not in text:
        raise StageError(f"{path} has no {{response}}: what should the judge judge?")
    return text


def request(params: Judge, template: str, row: Row) -> dict[str, Any]:
    """The chat completion that is asked for."""
    values = {**row["extra"], **{name: row[name] for name in TEMPLATE_NAMES}}

    def fill(hole: re.Match[str]) -> str:
        value = values.get(hole[1])
        return "" if value is None else value if isinstance(value, str) else json.dumps(value)

    messages = [{"role": "user", "content": _HOLE.sub(fill, template)}]
    if params.system is not None:
        messages.insert(0, {"role": "system", "content": params.system})
    return {
        "model": params.model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": params.max_tokens,
    }


def parse(text: str, params: Judge) -> float | None:
    """The score in an answer, if it is within the range."""
    number = _field(text, params.field) if params.field else _last_number(text, params.high)
    return number if number is not None and params.low <= number <= params.high else None


def _last_number(text: str, high: float) -> float | None:
    """The last number that does not just say how high the scale is."""
    highest = rf"{re.escape(f'{high:.15g}')}(?:\.0+)?(?!(?:[^\W\d]|\.)*+\d)"
    scales = (
        r"/\s*",
        r"\bout\s+of\b(?:\s+(?:an?|the|possible|maximum|total|of)\b)*\s*",
        r"\bscale\s+(?:of|from)\s+(?:[-+]?[\d.]+\s*(?:to|-|\u2013)\s*)?",
        rf"\b(?={highest}-point\b)",
    )
    of_high = re.sub(rf"(?:{'|'.join(scales)}){highest}", " ", text, flags=re.IGNORECASE)
    numbers = _NUMBER.findall(of_high)
    return float(numbers[-1].replace(",", "")) if numbers else None


def _field(text: str, field: str) -> float | None:
    """The field of the last JSON object that has it; of one within another, the outer one's."""
    decoder, number, at = json.JSONDecoder(), None, 0
    while (at := text.find("{", at)) >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        inside = _number_in(value, field)
        number = number if inside is None else inside
    return number


def _number_in(value: Any, field: str) -> float | None:
    if isinstance(value, dict):
        number = value.get(field)
        if isinstance(number, int | float) and not isinstance(number, bool):
            try:
                return float(number)
            except OverflowError:
                return None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    inside = [number for part in parts if (number := _number_in(part, field)) is not None]
    return inside[-1] if inside else None


def _recall(path: Path) -> tuple[str, bool] | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return str(kept["said"]), bool(kept["cut"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, reply: str, cut: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
    aside.write_text(json.dumps({"said": reply, "cut": cut}), encoding="utf-8")
    os.replace(aside, path)
