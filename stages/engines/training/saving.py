"""A learner's weights as a Hugging Face folder, written by all ranks, and the hash of them.

Each rank writes some of the files, as the weights come to it one by one; which tensors a file has
depends on the model alone (models/tensor_files.py). Models whose files are arranged in another way
than their weights are in memory, and adapters, are put together and written by rank 0.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.contracts.lora import ALL_WEIGHTS, LoraParams
from stages.engines.models import resident
from stages.engines.models.folders import (
    as_computed,
    content_hash,
    hash_lines,
    hash_of_lines,
    save_beside_weights,
    save_model,
)
from stages.engines.models.lora import has_adapter, unwrapped
from stages.engines.models.tensor_files import Form, write_tensor_files
from stages.engines.models.weights import STEM, is_rearranged, stored_names
from stages.engines.processes.ranks import ALONE, Ranks
from stages.engines.training.learner import AnyLearner

Beside = Mapping[str, str | bytes]
"""Tensors of a model that are not sampled with: of a tied one the name of the weight that it is, of
any other its line."""


def save_learner(
    learner: AnyLearner,
    folder: Path,
    *,
    tokenizer_from: Path,
    lora: LoraParams = ALL_WEIGHTS,
    ranks: Ranks = ALONE,
) -> dict[Path, str]:
    """The folder that `save_model` would write of the float32 weights; all ranks call it.

    It is written to where rank 0 says. Returns the md5 of the files that were hashed on the way.
    """
    folder = ranks.same(folder)
    model = learner.model
    if not _comes_in_turn(model):
        with learner.full_precision() as whole:
            if not ranks.rank:
                save_model(whole, folder, tokenizer_from=tokenizer_from, lora=lora)
        return {}
    ranks.first_does(lambda: folder.mkdir(parents=True, exist_ok=True))
    weights = _Weights(learner)
    forms = {name: weights.form(name) for name in stored_names(model)}
    num_parameters = sum(torch.Size(form.shape).numel() for form in forms.values())
    hashes = write_tensor_files(
        folder,
        STEM,
        forms,
        weights.fetch,
        ranks,
        metadata={"format": "pt"},
        index_metadata={"total_parameters": num_parameters},
        new_hash=md5,
    )
    if not ranks.rank:
        save_beside_weights(model, folder, tokenizer_from)
    resident.note_saved(model, folder)
    return {folder / name: digest for name, digest in hashes.items()}


def md5() -> Any:
    """The hash that DVC names files by."""
    return hashlib.md5(usedforsecurity=False)


def sampling_hash(learner: AnyLearner, ranks: Ranks = ALONE) -> str:
    """The hash under which a sampler answers that loads the weights as they are now; all ranks."""
    model = learner.model
    if not _comes_in_turn(model):
        with learner.full_precision() as whole:
            return ranks.same("" if ranks.rank else content_hash(whole, learner.precision))
    weights = _Weights(learner)
    mine: list[str] = []

    def in_turn() -> Iterator[tuple[str, Tensor]]:
        for index, name in enumerate(sorted(model.state_dict(keep_vars=True))):
            reader = index % ranks.world
            tensor = weights.fetch(name, reader)
            if reader == ranks.rank:
                assert tensor is not None
                mine.append(name)
                yield name, tensor

    own = list(hash_lines(in_turn(), as_computed(model, learner.precision)))
    of_ranks = ranks.gather(dict(zip(mine, own, strict=True)))
    lines = {name: line for some in of_ranks for name, line in some.items()}
    return hash_of_lines(lines[name] for name in sorted(lines))


def hash_of_sampled(lines: Mapping[str, bytes], beside: Beside) -> str:
    """The same hash, from the lines of all that `sampled_weights` yields."""
    every = dict(lines)
    for name, known in beside.items():
        if isinstance(known, str):
            known = name.encode() + lines[known].removeprefix(known.encode())
        every[name] = known
    return hash_of_lines(every[name] for name in sorted(every))


def beside_sampled(model: Any, names: Iterable[str]) -> Beside:
    """What the hash is made of beside the weights of these names, which are sampled with."""
    state = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in unwrapped(model).state_dict(keep_vars=True).items()
        if ".lora_" not in name
    }
    sampled = {id(state[name]): name for name in names}
    beside: dict[str, str | bytes] = {}
    for name in state.keys() - sampled.values():
        if (tied := sampled.get(id(state[name]))) is not None:
            beside[name] = tied
        else:
            [beside[name]] = hash_lines([(name, state[name])], lambda _, buffer: buffer)
    return beside


def _comes_in_turn(model: Any) -> bool:
    """Whether the model's files hold what it has in memory, tensor by tensor."""
    fresh = getattr(model, "_weight_conversions", None) is None
    return not (fresh or has_adapter(model) or is_rearranged(model))


class _Weights:
    """The tensors of a model's state, of which the learner may hold a part on each rank."""

    def __init__(self, learner: AnyLearner) -> None:
        self._learner = learner
        self._held = learner.held()
        self._state = learner.model.state_dict(keep_vars=True)
        names = {id(parameter): name for name, parameter in learner.model.named_parameters()}
        self._learns_as = {
            name: f"weight.{names[id(tensor)]}"
            for name, tensor in self._state.items()
            if id(tensor) in names
        }

    def form(self, name: str) -> Form:
        learns_as = self._learns_as.get(name)
        return self._held[learns_as] if learns_as else Form.of(self._state[name])

    def fetch(self, name: str, to: int) -> Tensor | None:
        learns_as = self._learns_as.get(name)
        return self._learner.whole(learns_as, to) if learns_as else self._state[name]
