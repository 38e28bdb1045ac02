"""The tokenizer of a GGUF file: the one in it, or another that lies beside it.

Either numbers the tokens as the file does, or is refused. Where it does not say which tokens begin,
end and fill up a text, or how a conversation is written, the file does. The padding token is one
that means nothing else, where the vocabulary has such a one.
"""

from pathlib import Path
from typing import Any

from stages.context import StageError

EOS_KEY = "tokenizer.ggml.eos_token_id"
_PADDING = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")
_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": EOS_KEY,
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_ENDS = (EOS_KEY, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Of a text, of a turn, and of a message that a tool is to answer."""
_TEMPLATE = "tokenizer.chat_template"
_UNUSED = 5
"""The type of a token that only fills up the vocabulary, to the number of rows of weights."""


def take_tokenizer(file: Path, metadata: dict[str, Any], given: Any = None) -> Any:
    """The given tokenizer, or the file's, with what the file says wherever it is silent."""
    tokenizer = given or _converted(file)
    _check_tokens(file, tokenizer, metadata, is_given=given is not None)
    padding = given.pad_token if given else None
    for name, key in _SPECIAL.items():
        token = _token(metadata, key)
        if token is not None and (given is None or getattr(given, name) is None):
            setattr(tokenizer, name, token)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = metadata.get(_TEMPLATE)
    if tokenizer.eos_token_id is None:
        raise StageError(f"{file} does not say which token ends a text ({EOS_KEY})")
    if padding is None:
        _choose_padding(tokenizer, metadata)
    return tokenizer


def named_ends(metadata: dict[str, Any]) -> list[int]:
    """The tokens that the file says end a response."""
    return [int(metadata[key]) for key in _ENDS if _token(metadata, key) is not None]


def _converted(file: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
    except (ValueError, NotImplementedError, LookupError) as error:
        raise StageError(
            f"{file}: transformers cannot convert its tokenizer ({error}): put the model's own "
            "tokenizer.json beside the file"
        ) from error


def _tokens(metadata: dict[str, Any]) -> list[str]:
    return list(metadata.get("tokenizer.ggml.tokens") or ())


def _token(metadata: dict[str, Any], key: str) -> str | None:
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    known = key in metadata and int(metadata[key]) < len(tokens)
    return str(tokens[int(metadata[key])]) if known else None


def _choose_padding(tokenizer: Any, metadata: dict[str, Any]) -> None:
    tokens = _tokens(metadata)
    ends = {tokens[index] for index in named_ends(metadata)}
    meaningful = {tokenizer.eos_token, tokenizer.bos_token, *ends}
    if tokenizer.pad_token is None or tokenizer.pad_token in meaningful:
        free = (token for token in _PADDING if token in tokens and token not in meaningful)
        tokenizer.pad_token = next(free, tokenizer.eos_token)


def _check_tokens(file: Path, tokenizer: Any, metadata: dict[str, Any], *, is_given: bool) -> None:
    """StageError where the tokenizer gives a token another number than the file does."""
    tokens = _tokens(metadata)
    if not tokens and is_given:
        return
    moved = _moved(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type") or ())
    if not moved:
        return
    counted = f"{len(moved)} of {len(tokens)} tokens otherwise than the file does ({moved[0]!r})"
    if is_given:
        raise StageError(
            f"{file}: the tokenizer.json beside it numbers {counted}: put the one of this very "
            "model there, or take it away"
        )
    raise StageError(
        f"{file}: the converted tokenizer numbers {counted}: put the model's own tokenizer.json "
        "beside the file"
    )


def _moved(tokenizer: Any, tokens: list[str], types: Any) -> list[str]:
    """The tokens that are another one in the file, or none; a filler may be missing.

    Files have the spaces of some tokens as they are, where tokenizers have sentencepiece's sign.
    """
    vocabulary = {index: _spaced(token) for token, index in tokenizer.get_vocab().items()}
    named = {index: _spaced(token) for index, token in enumerate(tokens)}
    fillers = {index for index, kind in enumerate(types) if int(kind) == _UNUSED}
    return [
        named[index] if index in named else vocabulary[index]
        for index in sorted(vocabulary.keys() | (named.keys() - fillers))
        if vocabulary.get(index) != named.get(index)
    ]


def _spaced(token: str) -> str:
    return token.replace("\u2581", " ")
