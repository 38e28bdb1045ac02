"""The model that everything starts from, out of what a user has: a folder, or a GGUF file.

Whatever it was, artifacts/base is a Hugging Face folder with safetensors, a fast tokenizer
(tokenizer.json) and a chat template, whose tokenizer and config agree on what ends a response.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from stages.context import StageError
from stages.contracts.model import ModelParams
from stages.contracts.precision import Precision
from stages.data.artifacts import set_modes
from stages.data.chat_templates import check_it_asks, check_it_reads, choose_template
from stages.engines.models.folders import stored_end_ids
from stages.engines.models.gguf_file import convert_gguf, find_gguf
from stages.engines.models.given_folder import ModelKind, check_folder, copy_folder

PARAM = "model.trust_remote_code"
CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")
"""What configs call the longest sequence."""


def take_base_model(params: ModelParams, precision: Precision, source: Path, target: Path) -> Any:
    """Make the folder and return its tokenizer; StageError names what is missing."""
    where = f"model.folder {source}"
    if not source.exists():
        raise StageError(f"{where} does not exist")
    file = find_gguf(source, where)
    if file is not None:
        folder = file.parent
        has_tokenizer = (folder / "tokenizer.json").is_file()
        given = load_tokenizer(folder, where) if has_tokenizer else None
        tokenizer = convert_gguf(file, target, precision, given)
        choose_template(tokenizer, params.chat_template, folder, where)
        tokenizer.save_pretrained(target)
    else:
        trusted = params.trust_remote_code
        check_folder(source, where, ModelKind.POLICY, PARAM, trust_code=trusted)
        tokenizer = load_tokenizer(source, where, trust_code=trusted)
        changed = choose_template(tokenizer, params.chat_template, source, where)
        copy_folder(source, target, with_code=trusted)
        if changed or not _is_stored(tokenizer, source):
            tokenizer.save_pretrained(target)
    check_it_reads(tokenizer, where)
    check_it_asks(tokenizer, where)
    _check_agreement(tokenizer, params.max_length, target, where)
    set_modes(target)
    return tokenizer


def load_tokenizer(folder: Path, where: str, *, trust_code: bool = False) -> Any:
    """A folder's tokenizer, in its fast form."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_code
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        first = str(error).strip().split("\n", 1)[0]
        raise StageError(
            f"{where} has no tokenizer that can be loaded ({first}): save one there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder); a tokenizer.model alone "
            "also needs the package sentencepiece"
        ) from error
    if not tokenizer.is_fast or not tokenizer.get_vocab():
        raise StageError(
            f"{where} has no tokenizer (tokenizer.json), nor the files of one that transformers "
            "turns into a fast one: save it there with AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(folder)"
        )
    return tokenizer


def _is_stored(tokenizer: Any, folder: Path) -> bool:
    """Whether tokenizer.json is the tokenizer that transformers has made of the folder's files."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return False
    stored = Tokenizer.from_file(str(path)).to_str()
    return bool(stored == tokenizer.backend_tokenizer.to_str())


def _check_agreement(tokenizer: Any, max_length: int, folder: Path, where: str) -> None:
    """StageError where tokenizer, model and params mean different things."""
    ends = stored_end_ids(folder)
    if tokenizer.eos_token_id not in ends:
        raise StageError(
            f"{where}: the tokenizer ends a response with token {tokenizer.eos_token_id}, but "
            f"config.json's eos_token_id says {sorted(ends)}: make them agree, or no response "
            "will ever be seen to end"
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    context = next((config[name] for name in CONTEXT if config.get(name)), None)
    if context is not None and max_length > context:
        raise StageError(
            f"model.max_length is {max_length}, but {where} has a context of {context} tokens: "
            "lower it"
        )
    known = config.get("vocab_size")
    last = max(tokenizer.get_vocab().values())
    if known is not None and last >= known:
        raise StageError(
            f"{where}: the tokenizer has tokens up to number {last}, but the model (config.json's "
            f"vocab_size) knows {known}: call model.resize_token_embeddings(len(tokenizer)), and "
            "save it again"
        )
