"""Training an adapter instead of all weights, and adapters in folders.

An *adapter folder* holds an adapter in the form that peft reads, and the base it belongs to:

adapter_config.json            peft's; base_model_name_or_path is "base", relative to the folder
adapter_model.safetensors      peft's names; where there is a scalar head, the trained one too
base/                          a Hugging Face folder: the weights that stayed as they are

Elsewhere, PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "base"), folder)
loads it. The stages that only read a model get it merged and need not know.

Always true:
- The merged weight is base + alpha / rank * B A, computed in one way, to the same bits, whether the
  adapter is in a model, in parts on several ranks or in a folder, and on whichever device; so a
  model in training has the hash of the folder that it becomes.
- A fresh adapter changes no bit of the merged weights.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages.context import StageError
from stages.contracts.lora import LoraParams, LoraSave
from stages.data.artifacts import write_json
from stages.data.seeds import stable_hash

BASE = "base"
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ADAPTER = "default"
"""The name that peft gives to a model's only adapter."""
PREFIX = "base_model.model."
"""What peft puts before the names of a model's weights."""
HEAD = "score"
_NUMBERS = 1 << 21
"""Of a weight that are merged at a time: what is in between stays in a processor's caches."""


def is_adapter_folder(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def carries_moments(lora: LoraParams, folder: Path) -> bool:
    """Whether an optimizer's moments that belong to `folder` still fit what is about to learn.

    They do if all weights learn, or if the very same adapter goes on; a fresh one starts without.
    """
    if is_adapter_folder(folder):
        return _goes_on(lora, folder)
    return lora.rank == 0


def open_for_training(
    load: Callable[[Path, str], Any], folder: Path, device: str, lora: LoraParams, seed: int
) -> Any:
    """The model in `folder`, ready to learn; with a rank, under an adapter.

    An adapter folder goes on with its own adapter if that is what will be saved again; otherwise
    its merged weights are the base of a fresh one. The head of a scalar model learns in any case.
    """
    if lora.rank == 0:
        return load(folder, device)
    # On the CPU first: the weights of a fresh adapter do not depend on the device.
    if _goes_on(lora, folder):
        model = load(folder / BASE, "cpu")
        # The policy's adapter does not go on in a critic that starts from the policy.
        if _task(model) == _config(folder)["task_type"]:
            return _go_on(_with_adapter(model, lora, seed), folder, lora).to(device).eval()
    return _with_adapter(load(folder, "cpu"), lora, seed).to(device).eval()


def unwrapped(model: Any) -> Any:
    """The Hugging Face model itself, adapter layers inside, without peft's shell around it."""
    return model.get_base_model() if has_adapter(model) else model


def has_adapter(model: Any) -> bool:
    return hasattr(model, "get_base_model")


def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """A model's weights in the order of their names; those with an adapter are merged."""
    if not has_adapter(model):
        yield from sorted(model.state_dict().items())
        return
    config = model.peft_config[ADAPTER]
    yield from _merged(model, _adapter_weights(model), config.lora_alpha / config.r)


def merged_parameters(model: Any, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model under an adapter, merged one by one, by their names in the base.

    `read` gives one by its name in the model, of which the model itself may have only a part.
    """
    config = model.peft_config[ADAPTER]
    transposed = conv_layers(model)
    for name, _ in model.named_parameters():
        if ".lora_" in name or ".original_module." in name:
            continue
        weight = read(name)
        layer, is_adapted, _ = name.partition(".base_layer.weight")
        if is_adapted:
            a, b = (read(f"{layer}.lora_{part}.{ADAPTER}.weight") for part in "AB")
            is_conv = layer.removeprefix(PREFIX) in transposed
            weight = with_adapter(weight, a, b, config.lora_alpha / config.r, transposed=is_conv)
        plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
        yield plain.replace(f".modules_to_save.{ADAPTER}.", "."), weight


def merge_folder(base: Any, folder: Path, device: str) -> None:
    """Add the adapter in `folder` to the weights of its base, in place; the device computes."""
    weights = base.state_dict()
    adapter = load_file(folder / WEIGHTS, device=device)
    for name, value in _merged(base, adapter, adapter_scaling(folder)):
        weights[name].copy_(value)


def adapter_scaling(folder: Path) -> float:
    """What the product of an adapter folder's matrices is multiplied by."""
    config = _config(folder)
    return float(config["lora_alpha"] / config["r"])


def conv_layers(model: Any) -> set[str]:
    """The layers whose weights are stored the other way round, as GPT-2's are."""
    return {
        name.removesuffix(".base_layer")
        for name, module in unwrapped(model).named_modules()
        if type(module).__name__ == "Conv1D"
    }


def with_adapter(
    before: Tensor, a: Tensor, b: Tensor, scaling: float, *, transposed: bool
) -> Tensor:
    """A weight with the adapter's product added, computed where the adapter is.

    In float64, where the product of two float32 numbers is exact, and added up rank by rank: bits
    depend on the numbers alone, not on the device, the number of threads or a library for matrices.
    """
    left, right = (a.T, b.T) if transposed else (b, a)
    left, right = left.double().contiguous(), right.double().contiguous()
    before = before.to(a.device)
    merged = torch.empty_like(before)
    rows = max(1, _NUMBERS // before.shape[1])
    in_rows = (torch.split(each, rows) for each in (before, left, merged))
    for old, factors, new in zip(*in_rows, strict=True):
        more = torch.zeros_like(old, dtype=torch.float64)
        for rank in range(right.shape[0]):
            more.addcmul_(factors[:, rank, None], right[rank])
        more.mul_(scaling)
        # -0.0 + 0.0 is 0.0, and a fresh adapter has to leave every bit as it was.
        new.copy_(torch.where(more == 0, old, (old + more).to(old.dtype)))
    return merged


def save_adapter(model: Any, folder: Path) -> None:
    """The adapter folder of a model in training, without the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.peft_config[ADAPTER].to_dict()
    config |= {"base_model_name_or_path": BASE, "revision": None, "inference_mode": True}
    # A set has another order in every process.
    plain = {key: sorted(v) if isinstance(v, set) else v for key, v in config.items()}
    write_json(folder / CONFIG, plain)
    adapter = {name: value.cpu().contiguous() for name, value in _adapter_weights(model).items()}
    save_file(adapter, folder / WEIGHTS, metadata={"format": "pt"})
    base = dict(_base_weights(model))
    unwrapped(model).save_pretrained(folder / BASE, state_dict=base)


def _goes_on(lora: LoraParams, folder: Path) -> bool:
    return is_adapter_folder(folder) and lora.rank > 0 and lora.save is LoraSave.ADAPTER


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return config


def _task(model: Any) -> str:
    return "SEQ_CLS" if hasattr(model, HEAD) else "CAUSAL_LM"


def _with_adapter(model: Any, lora: LoraParams, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    head = model.get_output_embeddings()
    outside = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if module is head or name == HEAD or isinstance(module, torch.nn.Embedding)
    }
    if refused := sorted(outside & {name.rsplit(".", 1)[-1] for name in lora.targets}):
        raise StageError(
            f"lora.targets names {', '.join(refused)}: embeddings and the head take no adapter"
        )
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=lora.targets or "all-linear",
        task_type=_task(model),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stable_hash(seed, "lora"))
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise StageError(f"lora.targets {lora.targets}: {error}") from error


def _go_on(model: Any, folder: Path, lora: LoraParams) -> Any:
    from peft import set_peft_model_state_dict

    saved = load_file(folder / WEIGHTS)
    fresh = _adapter_weights(model)
    shapes = [{name: value.shape for name, value in part.items()} for part in (saved, fresh)]
    alpha = _config(folder)["lora_alpha"]
    if shapes[0] != shapes[1] or alpha != lora.alpha:
        raise StageError(
            f"the adapter in {folder} has rank {_config(folder)['r']}, alpha {alpha} and other "
            "layers than lora.rank, lora.alpha and lora.targets say, or one of these: go on with "
            "the values it was made with, or set lora.save to merged for a fresh one"
        )
    set_peft_model_state_dict(model, saved)
    for name, value in _adapter_weights(model).items():
        if not torch.equal(value, saved[name]) or not bool(value.isfinite().all()):
            raise StageError(
                f"{folder / WEIGHTS}: tensor {name} is not finite, or in memory not what it is in "
                "the file"
            )
    return model


def _adapter_weights(model: Any) -> dict[str, Tensor]:
    """As in adapter_model.safetensors."""
    from peft import get_peft_model_state_dict

    # "auto", peft's default, asks the Hugging Face hub about the base.
    weights: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return weights


def _base_weights(model: Any) -> Iterable[tuple[str, Tensor]]:
    """As in the folder that the model came from."""
    for name, value in sorted(unwrapped(model).state_dict().items()):
        if ".lora_" not in name and ".modules_to_save." not in name:
            yield name.replace(".base_layer.", ".").replace(".original_module.", "."), value


def _merged(
    model: Any, adapter: Mapping[str, Tensor], scaling: float
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model's base with an adapter added; one that fits no weight is an error."""
    left = {name.removeprefix(PREFIX): value for name, value in adapter.items()}
    transposed = conv_layers(model)
    for name, value in _base_weights(model):
        layer = name.removesuffix(".weight")
        if name in left:
            yield name, left.pop(name)
        elif f"{layer}.lora_A.weight" in left:
            a, b = (left.pop(f"{layer}.lora_{part}.weight") for part in "AB")
            merged = with_adapter(value, a, b, scaling, transposed=layer in transposed)
            # Some callers have all weights at once, which is too much for a GPU.
            yield name, merged.cpu()
        else:
            yield name, value
    if left:
        raise StageError(f"the adapter has weights that its base has not: {', '.join(left)}")
