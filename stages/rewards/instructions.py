"""instructions: whether a response follows instructions that a program can check.

The instructions have the names and arguments of IFEval (Zhou et al. 2023), so that its rows can be
scored as they are: each row's columns `instruction_id_list` and `kwargs`. Departures: sentences end
at `.`, `!` or `?` before a space, without a list of abbreviations; whether text in capitals or
small letters is English is not asked; and a response's language is not checked at all. An empty
response follows nothing.

A response may be anything, so the time that a check takes grows with its length and no faster.
"""

import difflib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.contracts.reward_rules import Counted, Instructions, Unsupported
from stages.rewards.given import Row, Unusable, list_of

IDS, ARGUMENTS = "instruction_id_list", "kwargs"
_BULLET = re.compile(r"^[^\S\n]*+(?:\*[^*\n]|-)", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^*\n]+)\*\*|\*([^*\n]+)\*")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++[\"')\]]*+(?=\s|$)")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]*+\]")
_FENCE = re.compile(r"```(?:json)?(.*?)```", re.DOTALL | re.IGNORECASE)
_OPINIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def open_rule(params: Instructions, _folder: Path) -> Callable[[Row], float]:
    fixed = [(instruction.id, instruction.kwargs) for instruction in params.instructions]
    for name, arguments in fixed:
        _check_fixed(name, arguments)

    def reward(row: Row) -> float:
        asked = [
            (name, arguments)
            for name, arguments in fixed or _of_row(row)
            if name in CHECKS or not _may_skip(name, params.unsupported)
        ]
        if not asked:
            raise Unusable("it has no instruction that can be checked: leave such rows out")
        followed = [follows(row["response"], name, arguments) for name, arguments in asked]
        if params.counted is Counted.ALL:
            return float(all(followed))
        return sum(followed) / len(followed)

    return reward


def _check_fixed(name: str, arguments: Mapping[str, Any]) -> None:
    """ValueError where an instruction of params.yaml can be followed by nobody."""
    if name in UNCHECKED:
        return
    if name not in CHECKS:
        near = difflib.get_close_matches(name, CHECKS, 1)
        hint = f": did you mean {near[0]}?" if near else "; docs/rewards.md lists those there are"
        raise ValueError(f"there is no instruction {name!r}{hint}")
    taken = list(inspect.signature(CHECKS[name]).parameters)[1:]
    if odd := [key for key in arguments if key not in taken]:
        raise ValueError(
            f"the instruction {name} takes {', '.join(taken) or 'nothing'}, not {odd[0]}"
        )
    if missing := [key for key in taken if arguments.get(key) is None]:
        raise ValueError(f"the instruction {name} lacks {', '.join(missing)}")


def follows(response: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a response does what one instruction says."""
    check = CHECKS[name]
    taken = inspect.signature(check).parameters
    given = {key: value for key, value in arguments.items() if value is not None and key in taken}
    missing = [key for key in list(taken)[1:] if key not in given]
    if missing:
        raise Unusable(f"its instruction {name} lacks {', '.join(missing)}")
    return bool(response.strip()) and bool(check(response, **given))


def _of_row(row: Row) -> list[tuple[str, Mapping[str, Any]]]:
    extra = row["extra"]
    names, arguments = list_of(extra, IDS), list_of(extra, ARGUMENTS)
    if not names:
        raise Unusable(f"it has no column {IDS!r}, and the source no `instructions`")
    if arguments is None or len(arguments) != len(names):
        raise Unusable(f"its column {ARGUMENTS!r} has not one entry for each of {IDS!r}")
    return [(name, given or {}) for name, given in zip(names, arguments, strict=True)]


def _may_skip(name: str, unsupported: Unsupported) -> bool:
    if unsupported is Unsupported.SKIP:
        return True
    raise Unusable(
        f"there is no check for its instruction {name!r}: leave such rows out, or set "
        "`unsupported: skip`"
    )


def _compares(count: int, relation: str, limit: int) -> bool:
    if relation not in ("at least", "less than"):
        raise Unusable(f"its relation {relation!r} is neither 'at least' nor 'less than'")
    return count >= limit if relation == "at least" else count < limit


def _count_word(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _no_comma(text: str) -> bool:
    return "," not in text


def _words(text: str, num_words: int, relation: str) -> bool:
    return _compares(len(re.findall(r"\w+", text)), relation, num_words)


def _sentences(text: str, num_sentences: int, relation: str) -> bool:
    parts = [part for part in _SENTENCE_END.split(text) if re.search(r"\w", part)]
    return _compares(len(parts), relation, num_sentences)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Divided by three asterisks, none of them empty."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    inner = parts[1:-1] if len(parts) > 1 else []
    return all(inner) and len([part for part in parts if part]) == num_paragraphs


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Divided by blank lines."""
    parts = [part.strip() for part in re.split(r"\n\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    word = re.match(r"[\"'(*]*([^\s.,?!:;\"')*]+)", parts[int(nth_paragraph) - 1])
    return word is not None and word[1].lower() == first_word.lower()


def _keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def _forbidden(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(_count_word(text, word) for word in forbidden_words)


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    count = len(re.findall(re.escape(keyword), text, re.IGNORECASE))
    return _compares(count, relation, frequency)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compares(text.lower().count(letter.lower()), let_relation, let_frequency)


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    count = sum(word.isupper() for word in re.findall(r"\w[\w'-]*", text))
    return _compares(count, capital_relation, capital_frequency)


def _repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _two_responses(text: str) -> bool:
    """Divided by six asterisks, and not the same."""
    parts = [part.strip() for part in text.split("******")]
    if any(not part for part in parts[1:-1]):
        return False
    responses = [part for part in parts if part]
    return len(responses) == 2 and responses[0] != responses[1]


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(_PLACEHOLDER.findall(text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    spelt = re.escape(postscript_marker.strip()).replace(r"\.", r"\.\s?")
    return re.search(spelt, text, re.IGNORECASE) is not None


def _constrained(text: str) -> bool:
    return any(opinion in text for opinion in _OPINIONS)


def _json(text: str) -> bool:
    fenced = _FENCE.fullmatch(text.strip())
    try:
        json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    marks = re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)
    return len(marks) >= num_sections


def _bullets(text: str, num_bullets: int) -> bool:
    return len(_BULLET.findall(text)) == num_bullets


def _highlights(text: str, num_highlights: int) -> bool:
    highlights = [double or single for double, single in _HIGHLIGHT.findall(text)]
    return len([part for part in highlights if part.strip()]) >= num_highlights


def _title(text: str) -> bool:
    """Between << and >> in one line."""
    lines = text.split("\n")
    return any(line.partition("<<")[2].rpartition(">>")[0].strip("< >") for line in lines)


def _end(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quotation(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 1 and stripped[0] == stripped[-1] == '"'


CHECKS: Mapping[str, Callable[..., bool]] = {
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "combination:repeat_prompt": _repeats_prompt,
    "combination:two_responses": _two_responses,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:json_format": _json,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:title": _title,
    "keywords:existence": _keywords,
    "keywords:forbidden_words": _forbidden,
    "keywords:frequency": _keyword_frequency,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_words": _words,
    "punctuation:no_comma": _no_comma,
    "startend:end_checker": _end,
    "startend:quotation": _quotation,
}
"""A check of each instruction that is known: a function of the response and its arguments."""
UNCHECKED = ("language:response_language",)
"""Instructions of IFEval that are known, and for which there is no check."""
