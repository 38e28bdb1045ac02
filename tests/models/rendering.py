"""What a tokenizer makes of a question and of an answer, as prepare does it."""

from typing import Any

from stages.data.dialogue import asked, reply
from stages.data.tokenizer import Renderer


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    renderer = Renderer(tokenizer)
    (ids,) = renderer.ids(renderer.prompt_texts([asked(text)]))
    return renderer.prompt_ids(ids)


def response_ids(tokenizer: Any, text: str) -> list[int]:
    renderer, prompt = Renderer(tokenizer), asked("a")
    (before,) = renderer.prompt_texts([prompt])
    segments = renderer.response(prompt, before, [reply(text)])
    return renderer.joined(segments, renderer.ids([each.text for each in segments])).ids
