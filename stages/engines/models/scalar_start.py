"""What a reward model starts from: the base, or a folder of the user's that shares its tokenizer.

A causal language model gets a new head, whose weights are zero. A sequence classifier keeps its
own; of several labels one is kept. Token ids are read as they are, so the two tokenizers must give
every token the same number: anything else would be read as another text.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stages.context import StageError
from stages.data.tokenizer import Decoder
from stages.engines.models.base_folder import load_tokenizer
from stages.engines.models.folders import load_scalar_model, start_scalar_model
from stages.engines.models.given_folder import ModelKind, check_folder
from stages.engines.models.labels import choose_label, labels_of

Start = Callable[[Path, str], Any]
"""(folder, device) to a model with a scalar head."""


def start_of(folder: Path, base: Path, label: int | str | None) -> Start:
    """How to load a user's folder; StageError where it is not fit."""
    where = f"reward_model.folder {folder}"
    check_folder(folder, where, ModelKind.SCORER, "model.trust_remote_code", trust_code=False)
    _check_tokenizer(folder, base, where)
    if not is_classifier(folder):
        if label is not None:
            raise StageError(f"{where} is a language model without labels: leave label null")
        return start_scalar_model
    chosen = choose_label(where, label, labels_of(folder))
    return lambda path, device: _with_one_label(path, device, chosen, where)


def is_classifier(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = config.get("architectures") or ()
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def _with_one_label(folder: Path, device: str, label: int, where: str) -> Any:
    model = load_scalar_model(folder, device)
    head = getattr(model, "score", None)
    if not isinstance(head, torch.nn.Linear):
        raise StageError(
            f"{where}: a {type(model).__name__} has no plain head on a decoder, which training and "
            "token rewards need: name it under `rewards` as kind: model, to be used as it is"
        )
    if head.out_features > 1:
        own = torch.nn.Linear(head.in_features, 1, bias=head.bias is not None, device=device)
        own.weight.data = head.weight.data[label : label + 1].clone()
        if head.bias is not None:
            own.bias.data = head.bias.data[label : label + 1].clone()
        model.score, model.num_labels, model.config.num_labels = own, 1, 1
    return model


def _check_tokenizer(folder: Path, base: Path, where: str) -> None:
    theirs = dict(load_tokenizer(folder, where).get_vocab())
    ours = Decoder(base).vocabulary()
    other = sorted(t for t in theirs.keys() | ours.keys() if theirs.get(t) != ours.get(t))
    if other:
        token = other[0]
        raise StageError(
            f"{where} has another tokenizer than the base model: {len(other)} tokens differ, such "
            f"as {token!r}, number {ours.get(token)} for the base and {theirs.get(token)} there. "
            "Choose a model that shares the tokenizer, or name a finished one under `rewards` as "
            "kind: model, which reads responses as text"
        )
