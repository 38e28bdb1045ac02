"""Text to token ids, once, and token ids back to text.

`Renderer` is prepare's: it applies the chat template through transformers. `Decoder` is for the
other stages: it only reads text back, from tokenizer.json, without importing transformers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from stages.data.chat_templates import BUILT_IN, as_text
from stages.data.dialogue import REASONING, Dialogue, Message, is_plain
from stages.data.row_error import RowError
from stages.data.seeds import content_id

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"


_NO_ID = 2**31


class Decoder:
    """Token ids to text, for a model folder."""

    def __init__(self, model_folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))

    def text(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def known_text(self, ids: Sequence[int]) -> str:
        """The same of ids that somebody else says; ValueError where there is no such token."""
        for i in ids:
            if not 0 <= i < _NO_ID or self._tokenizer.id_to_token(i) is None:
                raise ValueError(f"the policy's tokenizer has no token {i}")
        return self.text(ids)

    def texts(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Those of several, on all cores."""
        ids = [list(response) for response in responses]
        return list(self._tokenizer.decode_batch(ids, skip_special_tokens=True))

    def vocabulary(self) -> dict[str, int]:
        """Every token with its id, special ones too."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def ids(self, text: str) -> list[int]:
        """The tokens of a text by itself, without special ones."""
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False).ids]


@dataclass(frozen=True)
class Segment:
    """A piece of a response that is tokenised by itself."""

    text: str
    by_assistant: bool = True
    """Whether the assistant says it; else it is the end token of one of its turns, which is left
    out again, and what comes between that turn and the next."""
    ends: bool = True
    """Whether the end-of-sequence token follows."""


class Renderer:
    """Dialogues to token ids, as the tokenizer's chat template says.

    What the assistant says is tokenised apart from what comes before it, and ends with the
    end-of-sequence token: those are the ids that a policy would sample after the prompt.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools` are offered to every prompt that has none of its own."""
        self._tokenizer = tokenizer
        self._tools = tuple(tools)
        self._template = tokenizer.chat_template
        self._bos: int | None = tokenizer.bos_token_id
        self._eos = int(tokenizer.eos_token_id)
        end = str(tokenizer.eos_token)
        self._end_as_text = end if self.ids([end]) == [[self._eos]] else ""

    @property
    def template_hash(self) -> str | None:
        """Of the chat template; None where there is none."""
        return None if self._template is None else content_id(str(self._template))

    def offered(self, prompt: Dialogue) -> tuple[Mapping[str, Any], ...]:
        """The tools that a prompt is rendered with."""
        return prompt.tools or self._tools

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text by itself, without special ones."""
        if not texts:
            return []
        tokenized = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        ids: list[list[int]] = tokenized["input_ids"]
        return ids

    def prompt_texts(self, prompts: Sequence[Dialogue]) -> list[str | RowError]:
        """Each prompt up to where the response starts; what the template refuses, as an error."""
        if self._template is None:
            return [_untemplated(prompt, self.offered(prompt)) for prompt in prompts]
        texts: Sequence[str | RowError]
        try:
            if any(prompt.tools for prompt in prompts):
                raise ValueError("tools go with one dialogue at a time")
            texts = self._rendered([prompt.messages for prompt in prompts], self._tools, asks=True)
        except Exception:  # one of them: each by itself tells which
            texts = [self._one_prompt(prompt) for prompt in prompts]
        return [
            text
            if isinstance(text, RowError)
            else _left_out(_tools_of(prompt, self.offered(prompt)), text) or text
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def prompt_ids(self, ids: list[int]) -> list[int]:
        """The ids of a prompt, given those of its text: without a template, a start token first."""
        starts = self._template is None and self._bos is not None
        return [self._bos, *ids] if starts else ids  # type: ignore[list-item]

    def response(self, prompt: Dialogue, asked: str, turns: Sequence[Message]) -> list[Segment]:
        """The turns that follow a prompt, whose text is `asked`; RowError where they cannot be.

        A plain response is its text. Of anything else the template says what it looks like: each
        turn of the assistant is what follows the dialogue before it, up to the end token; and the
        dialogue before a turn has to be the beginning of the whole, or the policy would be taught
        to go on from something that it never sees.
        """
        if len(turns) == 1 and is_plain(turns[0]):
            return [Segment(turns[0]["content"])]
        if self._template is None:
            raise RowError("it has several turns, and the tokenizer has no chat template for them")
        messages = [*prompt.messages, *turns]
        whole = self._by_itself(messages, prompt, asks=False)
        end = str(self._tokenizer.eos_token)
        segments: list[Segment] = []
        position = len(asked)
        for index in range(len(prompt.messages), len(messages)):
            if messages[index]["role"] != "assistant":
                continue
            before = asked if not segments else self._by_itself(messages[:index], prompt, asks=True)
            last = index == len(messages) - 1
            spoken = whole if last else self._by_itself(messages[: index + 1], prompt, asks=False)
            words, ended, after = spoken[len(before) :].rpartition(end)
            if not spoken.startswith(before) or not whole.startswith(before + words):
                raise RowError(
                    "the chat template writes a turn otherwise once others follow it, so that no "
                    "response can be told from what comes before: set prepare.turns to last, or "
                    "use a template that leaves earlier turns as they are"
                )
            if not ended or after.strip() or not whole.startswith(before + words + end):
                raise RowError(
                    f"the chat template does not end the assistant's turn with {end!r}, the end "
                    "token: make the tokenizer's eos_token the one that ends a turn"
                )
            if wrong := _left_out([*_called(messages[index]), *_thought(messages[index])], words):
                raise wrong
            if segments:
                # With the end token that it follows: at the start of a text, some tokenizers put
                # a space, and some end tokens swallow the line break after them.
                between = self._end_as_text + whole[position : len(before)]
                segments.append(Segment(between, by_assistant=False, ends=False))
            segments.append(Segment(words))
            position = len(before) + len(words) + len(end)
        return segments

    def joined(self, segments: Sequence[Segment], ids: Sequence[list[int]]) -> "Response":
        """Segments whose texts have these ids, one after another.

        A sampled response has one end token, so a text may write it at its end and nowhere else.
        """
        joined: list[int] = []
        mask: list[int] = []
        for segment, own in zip(segments, ids, strict=True):
            own = own[:-1] if segment.ends and own[-1:] == [self._eos] else own
            own = own[1:] if not segment.by_assistant and own[:1] == [self._eos] else own
            if segment.by_assistant and self._eos in own:
                raise RowError(
                    f"a response has {self._tokenizer.eos_token!r}, the end token, before its end: "
                    "no policy could go on after it, so take it out of the text"
                )
            joined += [*own, self._eos] if segment.ends else own
            mask += [int(segment.by_assistant)] * (len(joined) - len(mask))
        return Response(joined, mask if 0 in mask else None)

    def free_text(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """A text with no prompt: a start token, or the first one, and what is predicted from it."""
        ids = ids if ids[-1:] == [self._eos] else [*ids, self._eos]
        if self._bos is not None and ids[0] != self._bos:
            ids = [self._bos, *ids]
        if len(ids) < 2:
            raise RowError("the text is the end token alone: there is nothing to learn from it")
        return ids[:1], ids[1:]

    def _one_prompt(self, prompt: Dialogue) -> str | RowError:
        try:
            return self._by_itself(prompt.messages, prompt, asks=True)
        except RowError as error:
            return error

    def _by_itself(self, messages: Sequence[Message], prompt: Dialogue, *, asks: bool) -> str:
        try:
            [text] = self._rendered([messages], self.offered(prompt), asks=asks)
        except Exception as error:  # a template may raise anything
            raise RowError(f"the chat template refuses it ({error})") from None
        return text

    def _rendered(
        self,
        dialogues: Sequence[Sequence[Message]],
        tools: Sequence[Mapping[str, Any]],
        *,
        asks: bool,
    ) -> list[str]:
        messages_of = [[dict(message) for message in messages] for messages in dialogues]
        texts: list[str] = as_text(self._tokenizer, messages_of, asks=asks, tools=tools)
        return texts


@dataclass(frozen=True)
class Response:
    """The ids of a response, and where the assistant speaks in it."""

    ids: list[int]
    loss_mask: list[int] | None
    """None: everywhere."""


def _untemplated(prompt: Dialogue, tools: Sequence[Mapping[str, Any]]) -> str | RowError:
    if len(prompt.messages) == 1 and not tools:
        text: str = prompt.messages[0]["content"]
        return text
    return RowError(
        "its prompt is more than a question, and the tokenizer has no chat template to render it"
    )


def _tools_of(prompt: Dialogue, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the tools that a prompt offers, and of those that were called in it."""
    offered = (tool.get("function", tool) for tool in tools)
    names = [str(tool["name"]) for tool in offered if isinstance(tool, Mapping) and "name" in tool]
    return names + [name for message in prompt.messages for name in _called(message)]


def _called(message: Message) -> list[str]:
    return [str(call["function"]["name"]) for call in message.get("tool_calls", ())]


def _thought(message: Message) -> list[str]:
    return [str(message[name]).strip() for name in REASONING if name in message]


def _left_out(parts: Sequence[str], text: str) -> RowError | None:
    """What is wrong where a template does not write all that a message says."""
    for part in parts:
        if part not in text:
            return RowError(
                f"the chat template leaves {part[:40]!r} out, so a policy would be taught without "
                "it: use a template that writes tools and reasoning, or take them out of the data"
            )
    return None


def build_character_tokenizer(texts: Iterable[str]) -> Any:
    """A tokenizer with one token for each character that occurs in the texts."""
    from transformers import PreTrainedTokenizerFast

    characters = sorted(set().union(*map(set, texts)))
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNK, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        chat_template=BUILT_IN["plain"],
        clean_up_tokenization_spaces=False,
    )
