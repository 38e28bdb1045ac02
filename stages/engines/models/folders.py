"""Models from Hugging Face folders and back into them, and hashes of their weights.

A folder may hold an adapter beside its base; it is loaded merged. Whatever is loaded is checked
against the files, tensor by tensor (weights.py).
"""

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.contracts.lora import ALL_WEIGHTS, LoraParams, LoraSave
from stages.contracts.precision import Precision
from stages.data.artifacts import set_modes
from stages.engines.models import resident
from stages.engines.models.lean_transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    hidden,
)
from stages.engines.models.lora import (
    BASE,
    has_adapter,
    is_adapter_folder,
    merge_folder,
    named_weights,
    save_adapter,
    unwrapped,
)
from stages.engines.models.own_code import copy_code, may_run
from stages.engines.models.precision import is_rounded, round_weights, rounded
from stages.engines.models.scalar_class import AutoScalarModel
from stages.engines.models.tensor_files import FILE_BYTES
from stages.engines.models.weights import ModelPart, check_weights, stored_weights

HASHERS = min(
    16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
)
"""Threads that hash weights in parallel: one per core, each with one tensor in memory."""
Cast = Callable[[str, Tensor], Tensor]
"""(name, weight) to the weight as it is computed with."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
)


def load_policy(folder: Path, device: str = "cpu", precision: Precision = Precision.FLOAT32) -> Any:
    """A causal language model in evaluation mode."""
    return _load(AutoModelForCausalLM, folder, device, precision)


def load_scalar_model(
    folder: Path, device: str = "cpu", precision: Precision = Precision.FLOAT32
) -> Any:
    """A reward model or critic: a backbone with a scalar head."""
    return _load(AutoScalarModel, folder, device, precision)


def start_scalar_model(folder: Path, device: str = "cpu") -> Any:
    """The backbone of a language model with a new scalar head, whose weights are zero."""
    model = _load(
        AutoScalarModel,
        folder,
        device,
        Precision.FLOAT32,
        part=ModelPart.BACKBONE,
        num_labels=1,
    )
    torch.nn.init.zeros_(model.score.weight)
    return model


def save_model(
    model: Any, folder: Path, *, tokenizer_from: Path, lora: LoraParams = ALL_WEIGHTS
) -> None:
    """An ordinary Hugging Face folder, with the tokenizer of the one the model came from.

    A model under an adapter is merged, or, if `lora` says so, becomes an adapter folder.
    """
    plain = unwrapped(model)
    plain.config.use_cache = True
    files = {"max_shard_size": FILE_BYTES}
    # Transformers would import DeepSpeed here, for seconds, to ask whether this is its model.
    with hidden(("deepspeed",)):
        if not has_adapter(model):
            plain.save_pretrained(folder, **files)
        elif lora.save is LoraSave.ADAPTER:
            save_adapter(model, folder)
        else:
            plain.save_pretrained(folder, state_dict=dict(named_weights(model)), **files)
    _save_tokenizer(folder, tokenizer_from)
    resident.note_saved(model, folder)


def save_beside_weights(model: Any, folder: Path, tokenizer_from: Path) -> None:
    """All that `save_model` writes of float32 weights but these."""
    config = model.config
    config.use_cache = True
    config.dtype = "float32"
    # FSDP gives its models a class of its own.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    _save_tokenizer(folder, tokenizer_from)


def _save_tokenizer(folder: Path, tokenizer_from: Path) -> None:
    """The tokenizer and, where there is such, the model's own code."""
    for name in TOKENIZER_FILES:
        if (tokenizer_from / name).exists():
            shutil.copyfile(tokenizer_from / name, folder / name)
    copy_code(weights_folder(tokenizer_from), weights_folder(folder))
    set_modes(folder)


def content_hash(model: Any, precision: Precision = Precision.FLOAT32) -> str:
    """A hash of the weights that one computes with: names, shapes, types and bytes.

    With an adapter, of the merged weights: what the folder that it is saved to will load. Float32
    weights that another `precision` is made of are rounded to it first.
    """
    return hash_of_weights(named_weights(model), as_computed(model, precision))


def folder_hash(folder: Path, precision: Precision = Precision.FLOAT32) -> str:
    """The content hash of the policy that `load_policy` loads, a few tensors in memory at a time.

    For an engine that has its own way of loading; it has to check that way against the files.
    """
    if is_adapter_folder(folder):
        return content_hash(load_policy(folder), precision)
    model = without_weights(AutoModelForCausalLM, folder)
    stored = stored_weights(folder, model)
    # The files of some models are arranged in another way, or lack what is computed.
    if stored is None:
        return content_hash(load_policy(folder), precision)
    named = ((name, stored[name].whole().float()) for name in sorted(stored))
    return hash_of_weights(named, as_computed(model, precision))


def without_weights(auto_class: Any, folder: Path, **options: Any) -> Any:
    """The model in a folder, none of whose tensors have memory; `options` are its config's."""
    trusted = may_run(folder)
    config = AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trusted, **options
    )
    with torch.device("meta"):
        return auto_class.from_config(config, dtype=torch.float32, trust_remote_code=trusted)


def as_computed(model: Any, precision: Precision) -> Cast:
    """What rounds a float32 weight, by its name, to what the model computes with."""
    buffers = {name for name, _ in unwrapped(model).named_buffers()}

    def cast(name: str, tensor: Tensor) -> Tensor:
        if name not in buffers and is_rounded(model, name, tensor):
            return rounded(tensor, precision)
        return tensor

    return cast


def hash_of_weights(
    named: Iterable[tuple[str, Tensor]], cast: Cast = lambda _, tensor: tensor
) -> str:
    """Of weights in the order of their names, each as it is computed with."""
    return hash_of_lines(hash_lines(named, cast))


def hash_lines(named: Iterable[tuple[str, Tensor]], cast: Cast) -> Iterator[bytes]:
    """What the hash is made of: a line for each weight, in the same order."""

    def line(item: tuple[str, Tensor]) -> bytes:
        name = item[0]
        tensor = cast(name, item[1].detach())
        raw = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        of_bytes = hashlib.sha256(raw.numpy().data).hexdigest()
        return f"{name} {tuple(tensor.shape)} {tensor.dtype} {of_bytes}\n".encode()

    hashing: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(HASHERS) as hashers:
        for item in named:
            # A few at a time: merged weights are made as they are asked for.
            if len(hashing) == HASHERS:
                yield hashing.popleft().result()
            hashing.append(hashers.submit(line, item))
        for hashed in hashing:
            yield hashed.result()


def hash_of_lines(lines: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
    return digest.hexdigest()


def end_ids(model: Any) -> frozenset[int]:
    """The tokens that end a response."""
    configs = (model.config, getattr(model, "generation_config", None))
    return _known_ids(getattr(config, "eos_token_id", None) for config in configs)


def stored_end_ids(folder: Path) -> frozenset[int]:
    """The same of the model in a folder, which is not loaded."""
    weights = weights_folder(folder)
    files = [weights / "config.json", weights / "generation_config.json"]
    configs = (json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file())
    return _known_ids(config.get("eos_token_id") for config in configs)


def _known_ids(values: Iterable[Any]) -> frozenset[int]:
    """Of what configs have for an id: one, several or none."""
    lists = ([value] if isinstance(value, int) else value or [] for value in values)
    return frozenset(chain.from_iterable(lists))


def pad_id(model: Any) -> int:
    """The padding token. Padding is masked everywhere, so any token does."""
    value = model.config.pad_token_id
    return int(value) if value is not None else min(end_ids(model), default=0)


def _load(
    auto_class: Any,
    folder: Path,
    device: str,
    precision: Precision,
    *,
    part: ModelPart = ModelPart.ALL,
    **options: Any,
) -> Any:
    kind = f"{auto_class.__name__} {precision} {part} {sorted(options.items())}"
    kept = resident.take(kind, folder, device)
    if kept is not None:
        return kept
    weights = weights_folder(folder)
    model = auto_class.from_pretrained(
        weights,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=may_run(weights),
        **options,
    )
    if is_adapter_folder(folder):
        merge_folder(model, folder, device)
    round_weights(model, precision)
    model = model.to(device).eval()
    check_weights(model, folder, part)
    resident.lend(model, kind, folder, device)
    return model


def weights_folder(folder: Path) -> Path:
    """Where config.json and the weights that an adapter may change are."""
    return folder / BASE if is_adapter_folder(folder) else folder
