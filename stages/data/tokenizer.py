"""Text to token ids, once, and token ids back to text.

`Renderer` is prepare's: it applies the chat template through transformers. `Decoder` is for the
other stages: it only reads text back, from tokenizer.json, without importing transformers.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


class Decoder:
    """Token ids to text, for a model folder."""

    def __init__(self, model_folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))

    def text(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def vocabulary(self) -> dict[str, int]:
        """Every token with its id, special ones too."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def ids(self, text: str) -> list[int]:
        """The tokens of a text by itself, without special ones."""
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False).ids]


class Renderer:
    """Prompts and responses to token ids, as the tokenizer's chat template says."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids after which a response starts."""
        tokenizer = self._tokenizer
        if tokenizer.chat_template is None:
            ids = [int(i) for i in tokenizer(prompt, add_special_tokens=False)["input_ids"]]
            return [tokenizer.bos_token_id, *ids] if tokenizer.bos_token_id is not None else ids
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]

    def response_ids(self, response: str) -> list[int]:
        """The ids of a response that ended: its text and the end-of-sequence token."""
        ids = self._tokenizer(response, add_special_tokens=False)["input_ids"]
        return [*(int(i) for i in ids), int(self._tokenizer.eos_token_id)]


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
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
