"""Token ids as the pieces of text that they stand for, read with a model folder's tokenizer.json.

A piece is the least number of tokens that are text: a letter outside ASCII may take several. The
ids of all pieces, one after another, are the ids that were given; a piece never has tokens of two
kinds, such as trained and not trained. Ids are only read back, never made of text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.base.errors import LockstepError


@dataclass(frozen=True)
class Piece:
    """Some tokens that are one text."""

    ids: tuple[int, ...]
    text: str
    kind: int
    """What the caller said of these tokens."""
    special: bool = False
    """Whether it is a token that stands for no text, such as the end of a sequence."""


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder; LockstepError where there is none that can be read."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise LockstepError(
            "tokens are shown with the package tokenizers, which is not installed here: it comes "
            "with the compute plane (`pip install -e '.[train]'`), or by `pip install tokenizers`"
        ) from None
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise LockstepError(f"{path} does not exist: `lockstep run` or `dvc pull {folder}`")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # of the package's own, which has no class to name
        raise LockstepError(f"{path} cannot be read as a tokenizer: {error}") from None


def pieces(tokenizer: Any, ids: Sequence[int], kinds: Sequence[int]) -> list[Piece]:
    """The pieces of a sequence; `kinds` has a number for each of its tokens."""
    from tokenizers.decoders import DecodeStream

    special = {
        token_id for token_id, of in tokenizer.get_added_tokens_decoder().items() if of.special
    }
    found: list[Piece] = []
    stream = DecodeStream(skip_special_tokens=False)
    pending: list[int] = []
    for index, (token_id, kind) in enumerate(zip(ids, kinds, strict=True)):
        if token_id in special:
            found += _broken(tokenizer, pending, kinds[index - 1])
            found.append(Piece((token_id,), tokenizer.id_to_token(token_id), kind, special=True))
            stream, pending = DecodeStream(skip_special_tokens=False), []
            continue
        if pending and kinds[index - 1] != kind:
            found += _broken(tokenizer, pending, kinds[index - 1])
            stream, pending = DecodeStream(skip_special_tokens=False), []
        pending.append(token_id)
        text = stream.step(tokenizer, token_id)
        if text is not None:
            found.append(Piece(tuple(pending), text, kind))
            pending = []
    return found + _broken(tokenizer, pending, kinds[-1] if kinds else 0)


def _broken(tokenizer: Any, ids: Sequence[int], kind: int) -> list[Piece]:
    """Tokens that are no whole letter, and those that the tokenizer does not know."""
    if not ids:
        return []
    text = tokenizer.decode(list(ids), skip_special_tokens=False)
    return [Piece(tuple(ids), text or "".join(f"<{i}>" for i in ids), kind)]
