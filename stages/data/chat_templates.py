"""Chat templates, also for tokenizers that have none: how a conversation becomes text.

A template is Jinja, as transformers applies it, but for the day: some write today's date, and the
same data would have other tokens tomorrow. The built-in ones end what the assistant says with the
tokenizer's end-of-sequence token, as training and sampling do.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from stages.context import StageError

BUILT_IN = {
    # Texts one after another, as a model that has only been pretrained knows them.
    "plain": (
        "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{{ message['content'] }}"
        "{{ (eos_token if message['role'] == 'assistant' else '<|im_end|>') + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
TODAY = datetime(2024, 7, 26)
"""The day of every conversation: the one that Llama's templates name where they know of none."""


def as_text(
    tokenizer: Any,
    messages: Sequence[Any],
    *,
    asks: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Any:
    """What the template writes of one conversation, or of each of several."""
    return tokenizer.apply_chat_template(
        messages,
        tools=[dict(tool) for tool in tools] or None,
        add_generation_prompt=asks,
        tokenize=False,
        strftime_now=TODAY.strftime,
    )


def check_it_asks(tokenizer: Any, where: str) -> None:
    """StageError where a template names the assistant before its words, but not to ask for them.

    A policy would then be asked without what it was taught to see, or be taught to say it itself.
    """
    question, words = [{"role": "user", "content": "Who?"}], "Nobody."
    answered = [*question, {"role": "assistant", "content": words}]
    try:
        asks, only_tells, whole = (
            str(as_text(tokenizer, messages, asks=asks))
            for messages, asks in ((question, True), (question, False), (answered, False))
        )
    except Exception:  # what a template refuses is said of the rows that it refuses
        return
    before = whole[len(asks) :].partition(words)[0]
    if asks == only_tells and whole.startswith(asks) and before.strip():
        raise StageError(
            f"{where}: its chat template writes {before!r} before what the assistant says, but not "
            "where add_generation_prompt asks for it: add {% if add_generation_prompt %}"
            f"{before}{{% endif %}} to its end, in a .jinja file that model.chat_template names"
        )


def check_it_reads(
    tokenizer: Any, where: str, role: str = "user", param: str = "model.chat_template"
) -> None:
    """StageError where a template writes the same whatever the user, or the assistant, says."""
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody."}]
    messages = messages[: 1 if role == "user" else 2]
    other = [*messages[:-1], {"role": role, "content": "Something else."}]
    try:
        one, two = (as_text(tokenizer, talk, asks=role == "user") for talk in (messages, other))
    except Exception:  # what a template refuses is said of the rows that it refuses
        return
    if one == two:
        raise StageError(
            f"{where}: its chat template writes {one[:60]!r} whatever the {role} says, so all rows "
            f"would be one text: let it write each message's content, or set {param} to another"
        )


def choose_template(
    tokenizer: Any,
    wanted: str | None,
    folder: Path,
    where: str,
    param: str = "model.chat_template",
) -> bool:
    """Give the tokenizer the template that the param names; whether that changed it."""
    known = ", ".join(BUILT_IN)
    if wanted is None:
        if tokenizer.chat_template is None:
            raise StageError(
                f"{where}: its tokenizer has no chat template, so nothing says how a prompt is to "
                f"be put: set {param} to {known}, or to a .jinja file in the folder"
            )
        return False
    if wanted in BUILT_IN:
        vocabulary = tokenizer.get_vocab()
        lacking = [token for token in _CHATML_TOKENS if token not in vocabulary]
        if wanted == "chatml" and lacking:
            raise StageError(
                f"{param} is chatml, but the tokenizer has no token {lacking[0]}: set "
                "it to plain, or to a .jinja file in the folder"
            )
        tokenizer.chat_template = BUILT_IN[wanted]
        return True
    path = (folder / wanted).resolve()
    if not path.is_file() or not path.is_relative_to(folder.resolve()):
        raise StageError(f"{param} is {wanted}, which is neither {known} nor a file in {folder}")
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    return True
