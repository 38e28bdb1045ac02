"""A model folder that a user gives: what is refused about it, and what of it is copied.

Weights are read from safetensors alone, since pickles can run code while they are read. What is no
text model, cannot learn, or would need code that nobody has allowed is refused before anything is
computed, with what to do instead.
"""

import json
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Any

from stages.context import StageError
from stages.data.artifacts import set_modes
from stages.engines.models.own_code import allow_code, check_code_is_there, named_code, refusal

CARD = ("README.md", "LICENSE*")
"""Model card and licence."""
COPIED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", *CARD)
"""Weights, configs, tokenizer, chat template, model card and licence."""
NOT_COPIED = ("allowed_code.json", "trainer_state.json", "adapter_*")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json")
INDEX = ".safetensors.index.json"
OTHER_SENSES = ("vision_config", "audio_config", "speech_config")


class ModelKind(StrEnum):
    """What a given model is to do."""

    POLICY = "causal language model"
    SCORER = "sequence classifier"


def check_folder(
    folder: Path, where: str, kind: ModelKind, param: str, *, trust_code: bool
) -> None:
    """StageError where this is no folder of such a model, or its code is not allowed by `param`."""
    if not (folder / "config.json").is_file():
        raise StageError(f"{where} has no config.json: it is not a Hugging Face model folder")
    _check_weights_format(folder, where)
    _check_weights_are_whole(folder, where)
    config, *_ = [_read_json(folder / name) for name in CONFIGS if (folder / name).is_file()]
    if config.get("is_encoder_decoder"):
        raise StageError(
            f"{where} is an encoder-decoder model ({config.get('model_type')}): a decoder-only "
            f"{kind} is needed"
        )
    if senses := [name for name in OTHER_SENSES if name in config]:
        raise StageError(
            f"{where} is a model of more than text (config.json has {senses[0]}): save its text "
            "model alone, and name that folder"
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "?")
        raise StageError(
            f"{where} has quantised weights ({method}), which cannot learn: start from the folder "
            "that was quantised, or from a GGUF file"
        )
    _check_kind(folder, config, where, kind, param, trust_code=trust_code)


def copy_folder(source: Path, target: Path, *, with_code: bool) -> None:
    """What a run needs of the folder; the rest stays behind."""
    target.mkdir(parents=True)
    copy_files(source, target, COPIED)
    if with_code and named_code(source):
        allow_code(source, target)
    else:
        _forget_code(target)
    set_modes(target)


def copy_files(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    """The files of a folder that have such names."""
    left = {path for pattern in NOT_COPIED for path in source.glob(pattern)}
    for pattern in patterns:
        for path in sorted(set(source.glob(pattern)) - left):
            if path.is_file():
                shutil.copyfile(path, target / path.name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StageError(f"{path} is not JSON ({error}): save the model again") from None
    return values


def _check_weights_are_whole(folder: Path, where: str) -> None:
    """StageError where a file of weights is missing or was cut off: a copy that did not end."""
    from safetensors import SafetensorError, safe_open

    files = _weights_of_the_model(folder)
    for index in folder.glob(f"*{INDEX}"):
        parts = set(_read_json(index).get("weight_map", {}).values())
        if missing := sorted(parts - {path.name for path in files}):
            raise StageError(
                f"{where} lacks {missing[0]}, one of the {len(parts)} files of weights that "
                f"{index.name} names: copy it there, too"
            )
    for path in files:
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise StageError(
                f"{path} is damaged, or was not copied to its end ({error}): copy it again"
            ) from None


def _weights_of_the_model(folder: Path) -> list[Path]:
    adapters = set(folder.glob("adapter_*"))
    return sorted(path for path in folder.glob("*.safetensors") if path not in adapters)


def _check_weights_format(folder: Path, where: str) -> None:
    if _weights_of_the_model(folder):
        return
    if list(folder.glob("adapter_*.safetensors")):
        raise StageError(
            f"{where} holds an adapter alone: merge it into its base, with PeftModel."
            "merge_and_unload() and save_pretrained(folder), and name that folder"
        )
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise StageError(
            f"{where} has its weights in {pickles[0]}, a pickle, which can run code while it is "
            "read: convert it once, where you trust it, with AutoModelForCausalLM."
            "from_pretrained(folder).save_pretrained(new_folder), and name the new folder"
        )
    raise StageError(
        f"{where} has no *.safetensors weights: save the model with save_pretrained(folder)"
    )


def _check_kind(
    folder: Path,
    config: dict[str, Any],
    where: str,
    kind: ModelKind,
    param: str,
    *,
    trust_code: bool,
) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    from stages.engines.models.scalar_class import classifier_name

    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type"))
    scorer = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.get("model_type"))
    if scorer is None and causal is not None:
        scorer = classifier_name(causal)
    own_code = named_code(folder)
    if own_code and trust_code:
        check_code_is_there(folder)
        return
    wanted = [causal] if kind is ModelKind.POLICY else [causal, scorer]
    if wanted[-1] is None:
        if own_code:
            raise StageError(refusal(folder, param))
        raise StageError(
            f"{where}: transformers knows no {kind} of type {config.get('model_type')!r} "
            "(config.json's model_type)"
        )
    saved_as = config.get("architectures") or wanted
    if not any(name in wanted or name.endswith(("CausalLM", "LMHeadModel")) for name in saved_as):
        raise StageError(
            f"{where} holds a {saved_as[0]} (config.json's architectures), which is no {kind}"
        )


def _forget_code(folder: Path) -> None:
    """transformers has these classes itself: nothing is to load the folder's own."""
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            values = json.loads(path.read_text(encoding="utf-8"))
            if values.pop("auto_map", None) is not None:
                path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
