"""A GGUF file as an ordinary Hugging Face folder: weights dequantised, tokenizer and template kept.

transformers reads such files; what it leaves to chance is settled here. Every number of the file is
in the model, or the file is refused, and so is one whose positions transformers would not turn as
the file says. Every token that ends a response for the file ends one for the model.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from stages.context import StageError
from stages.contracts.precision import Precision
from stages.data.artifacts import set_modes
from stages.engines.models.gguf_card import take_card
from stages.engines.models.gguf_tokenizer import EOS_KEY, named_ends, take_tokenizer
from stages.engines.models.lean_transformers import AutoConfig, AutoModelForCausalLM, hidden
from stages.engines.models.precision import DTYPES

SUFFIX = ".gguf"
_NOT_OF_THE_MODEL = ("quantization_config", "_model_name_or_path", "unk_token_id")
_FREQUENCIES = "rope_freqs.weight"
_ASKED_AGAIN = ("GGUFReader", "get_tensor_name_map")
_NOT_SCALED = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),  # llama.cpp reads 0 as none
    "rope.scale_linear": (0, 1),  # what older files call the factor
    "rope.scaling.attn_factor": (1,),
}
_THETAS = {"rope.freq_base": "full_attention", "rope.freq_base_swa": "sliding_attention"}
"""Where configs with several bases keep the one that the file has by this name."""


def find_gguf(source: Path, where: str) -> Path | None:
    """The GGUF file that is meant, if one is: `source` itself, or the only model in that folder."""
    if source.is_file():
        if source.suffix != SUFFIX:
            raise StageError(f"{where} is a file, but not a {SUFFIX} file: name a model's folder")
        return source
    gguf_files = sorted(source.glob(f"*{SUFFIX}"))
    if not gguf_files or list(source.glob("*.safetensors")):
        return None
    if len(gguf_files) > 1:
        names = ", ".join(path.name for path in gguf_files)
        raise StageError(
            f"{where} holds several GGUF files ({names}): name one of them, "
            f"{where}/{gguf_files[0].name}"
        )
    return gguf_files[0]


def convert_gguf(file: Path, target: Path, precision: Precision, given: Any = None) -> Any:
    """Write the model's weights in this precision, and its card; returns its tokenizer, unsaved.

    That is the one in the file, unless another is given.
    """
    with _answered_once(file):
        metadata, num_numbers = _read_header(file)
        loaded = _load(file)
        tokenizer = take_tokenizer(file, metadata, given)
    _check_rotary_base(file, metadata, loaded.config)
    config = _plain_config(loaded, tokenizer, metadata)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    if num_weights != num_numbers:
        raise StageError(
            f"{file} holds {num_numbers} weights, but the {config.model_type} model that was read "
            f"from it has {num_weights}: transformers does not convert this kind of file faithfully"
        )
    model.to(DTYPES[precision])
    model.config.dtype = DTYPES[precision]
    with hidden(("deepspeed",)):  # see save_model
        model.save_pretrained(target)
    take_card(file, metadata, target)
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
    _check_not_scaled(file, metadata)
    return metadata, sum(int(tensor.n_elements) for tensor in reader.tensors)


def _check_not_scaled(file: Path, metadata: dict[str, Any]) -> None:
    """StageError where the file scales its rotary frequencies: transformers does not."""
    architecture = metadata.get("general.architecture")
    for name, neutral in _NOT_SCALED.items():
        key = f"{architecture}.{name}"
        if key in metadata and metadata[key] not in neutral:
            raise StageError(
                f"{file} scales its rotary frequencies ({key} is {metadata[key]}), which "
                "transformers leaves out when it converts: start from the model's safetensors"
            )


def _check_rotary_base(file: Path, metadata: dict[str, Any], config: Any) -> None:
    """StageError where the model turns positions by another base than the file says."""
    architecture = metadata.get("general.architecture")
    rotary = getattr(config, "rope_parameters", None) or {}
    for name, kind in _THETAS.items():
        stated = metadata.get(f"{architecture}.{name}")
        read = (rotary.get(kind) or rotary).get("rope_theta")
        if stated is not None and (read is None or not math.isclose(stated, read, rel_tol=1e-6)):
            raise StageError(
                f"{file} has the rotary base {stated:g} ({architecture}.{name}), but the "
                f"{config.model_type} model that was read from it has {read}: transformers does "
                "not convert this kind of file faithfully, start from the model's safetensors"
            )


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


def _plain_config(model: Any, tokenizer: Any, metadata: dict[str, Any]) -> Any:
    """As that of a model that was never quantised, with the tokenizer's special tokens."""
    values = model.config.to_dict()
    for name in _NOT_OF_THE_MODEL:
        values.pop(name, None)
    for name in ("bos", "pad"):
        values[f"{name}_token_id"] = getattr(tokenizer, f"{name}_token_id")
    values["eos_token_id"] = _every_end(model, tokenizer, metadata)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def _every_end(model: Any, tokenizer: Any, metadata: dict[str, Any]) -> int | list[int]:
    """The tokenizer's, those that the file names, and those that transformers adds to them."""
    known = dict.fromkeys([int(tokenizer.eos_token_id), *named_ends(metadata)])
    if EOS_KEY in metadata:  # else transformers has put that of another model of the kind
        value = model.config.eos_token_id
        known |= dict.fromkeys([value] if isinstance(value, int) else value or [])
    first, *others = known
    return [first, *others] if others else first
