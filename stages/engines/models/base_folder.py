"""A user's base model folder: checked for what a run needs of it, then copied."""

import json
import shutil
from pathlib import Path
from typing import Any

from stages.context import StageError
from stages.data.artifacts import set_modes


def copy_base_model(source: Path, target: Path) -> Any:
    """Copy the folder and return its tokenizer; StageError names what is missing."""
    from transformers import AutoTokenizer

    where = f"model.folder {source}"
    if not (source / "config.json").is_file():
        raise StageError(f"{where} has no config.json: it is not a Hugging Face model folder")
    if not list(source.glob("*.safetensors")):
        raise StageError(
            f"{where} has no *.safetensors weights: save the model with save_pretrained(folder)"
        )
    if not (source / "tokenizer.json").is_file():
        raise StageError(
            f"{where} has no tokenizer (tokenizer.json): save it there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
        )
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    ends = _end_ids(source)
    if tokenizer.eos_token_id not in ends:
        raise StageError(
            f"{where}: the tokenizer ends a response with token {tokenizer.eos_token_id}, but "
            f"config.json's eos_token_id says {sorted(ends)}: make them agree, or no response "
            "will ever be seen to end"
        )
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    set_modes(target)
    return tokenizer


def _end_ids(folder: Path) -> set[int]:
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            value = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            ends.update([value] if isinstance(value, int) else value or [])
    return ends
