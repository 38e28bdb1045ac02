"""A GGUF file as an ordinary Hugging Face folder: weights dequantised, tokenizer and template kept.

transformers reads such files; what it leaves to chance is settled here. Every number of the file is
in the model, or the file is refused. Which tokens begin, end and fill up a text is what the file
says. The padding token is one that means nothing else, where the vocabulary has such a one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from stages.context import StageError
from stages.contracts.precision import Precision
from stages.data.artifacts import set_modes
from stages.engines.models.lean_transformers import AutoConfig, AutoModelForCausalLM, hidden
from stages.engines.models.precision import DTYPES

SUFFIX = ".gguf"
_NOT_OF_THE_MODEL = ("quantization_config", "_model_name_or_path", "unk_token_id")
_FREQUENCIES = "rope_freqs.weight"
_PADDING = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")
_ASKED_AGAIN = ("GGUFReader", "get_tensor_name_map")
_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def find_gguf(source: Path, where: str) -> Path | None:
    """The GGUF file that is meant, if one is: `source` itself, or the only model in that folder."""
    if source.is_file():
        if source.suffix != SUFFIX:
            raise StageError(f"{where} is a file, but not a {SUFFIX} file: name a model's folder")
        return source
    found = sorted(source.glob(f"*{SUFFIX}"))
    if not found or list(source.glob("*.safetensors")):
        return None
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise StageError(
            f"{where} holds several GGUF files ({names}): name one of them, {where}/{found[0].name}"
        )
    return found[0]


def convert_gguf(file: Path, target: Path, precision: Precision, given: Any = None) -> Any:
    """Write the model's weights in this precision; returns its tokenizer, not saved yet.

    That is the one in the file, unless another is given.
    """
    with _answered_once(file):
        metadata, num_numbers = _read_header(file)
        tokenizer = given or _tokenizer(file, metadata)
        loaded = _load(file)
    config = _plain_config(loaded, tokenizer)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != num_numbers:
        raise StageError(
            f"{file} holds {num_numbers} weights, but the {config.model_type} model that was read "
            f"from it has {found}: transformers does not convert this kind of file faithfully"
        )
    model.to(DTYPES[precision])
    model.config.dtype = DTYPES[precision]
    with hidden(("deepspeed",)):  # see save_model
        model.save_pretrained(target)
    set_modes(target)
    return tokenizer


@contextmanager
def _answered_once(file: Path) -> Iterator[None]:
    """transformers asks gguf for the same again and again, and some answers take seconds each."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise StageError(
            f"{file} is read with the package gguf, which is not installed here: pip install gguf"
        ) from None
    before = {name: getattr(gguf, name) for name in _ASKED_AGAIN}
    try:
        for name, function in before.items():
            setattr(gguf, name, cache(function))
        yield
    finally:
        for name, function in before.items():
            setattr(gguf, name, function)


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """What the file says about itself, and how many weights it has."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(file))
    except (ValueError, IndexError, OSError) as error:
        raise StageError(f"{file} is not readable as GGUF: {error}") from error
    if any(tensor.name == _FREQUENCIES for tensor in reader.tensors):
        raise StageError(
            f"{file} scales its rotary frequencies by a table ({_FREQUENCIES}), which transformers "
            "leaves out when it converts: start from the model's safetensors"
        )
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    return metadata, sum(int(tensor.n_elements) for tensor in reader.tensors)


def _load(file: Path) -> Any:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, NotImplementedError, KeyError) as error:
        raise StageError(f"{file}: transformers cannot convert it: {error}") from error
    wrong = [name for kind in ("missing_keys", "unexpected_keys") for name in report[kind]]
    if wrong:
        raise StageError(
            f"{file}: {len(wrong)} tensors fit nowhere, or were not there ({min(wrong)}): "
            "transformers does not convert this kind of file faithfully"
        )
    return model


def _plain_config(model: Any, tokenizer: Any) -> Any:
    """As that of a model that was never quantised, with the tokenizer's special tokens."""
    values = model.config.to_dict()
    for name in _NOT_OF_THE_MODEL:
        values.pop(name, None)
    for name in ("bos", "eos", "pad"):
        values[f"{name}_token_id"] = getattr(tokenizer, f"{name}_token_id")
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _tokenizer(file: Path, metadata: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True
    )
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    for name, key in _SPECIAL.items():
        if key in metadata and int(metadata[key]) < len(tokens):
            setattr(tokenizer, name, tokens[int(metadata[key])])
    if tokenizer.eos_token_id is None:
        raise StageError(f"{file} does not say which token ends a text ({_SPECIAL['eos_token']})")
    meaningful = {tokenizer.eos_token, tokenizer.bos_token}
    if tokenizer.pad_token is None or tokenizer.pad_token in meaningful:
        free = (token for token in _PADDING if token in tokens and token not in meaningful)
        tokenizer.pad_token = next(free, tokenizer.eos_token)
    _check_tokens(file, tokenizer, list(tokens))
    return tokenizer


def _check_tokens(file: Path, tokenizer: Any, tokens: list[str]) -> None:
    """StageError where the converted tokenizer gives a token another number than the file does."""
    vocabulary = tokenizer.get_vocab()
    moved = [token for index, token in enumerate(tokens) if vocabulary.get(token) != index]
    if moved or len(vocabulary) != len(tokens):
        example = moved[0] if moved else max(vocabulary, key=vocabulary.__getitem__)
        raise StageError(
            f"{file}: the converted tokenizer numbers {len(moved)} of {len(tokens)} tokens "
            f"otherwise than the file does ({example!r}): put the model's own tokenizer.json "
            "beside the file"
        )
