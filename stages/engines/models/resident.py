"""Models that stay in memory from one stage to the next, in a process that stays.

Only the process of a session switches this on; elsewhere all of it does nothing. Always true:
- A model is kept under the hash of the folder that it equals: of an input, as the worker hashed it
  before the stage began, or of what the stage wrote, as the worker hashed it at the end.
- It is in one hand at a time. Whoever loads a model owns it and may train it; what is kept is kept
  again only when the stage has ended well, and only if it is what a fresh load would give: nothing
  about it has changed that can be seen; or it was saved, and is bit by bit what that folder holds.
- Nothing depends on it. What is not here is loaded, and what is kept never takes more memory than
  it is allowed to: the least recently used goes first.

Nothing here imports torch before a model is there: the worker imports this module first.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHARE = 4
"""One part in so many of the device's memory may be taken by what is kept."""
_CHUNK = 1 << 20


@dataclass(frozen=True)
class _Key:
    kind: str
    """How it was loaded: class, precision, options."""
    device: str
    content: str
    """The hash of the artifact, and the place in it, that the model equals."""


@dataclass
class _Held:
    """A model, and how one tells that it is still what was loaded."""

    key: _Key
    model: Any
    form: Any
    numbers: dict[str, int]
    saved_to: Path | None = None

    @property
    def layouts(self) -> dict[str, Any]:
        layouts: dict[str, Any] = self.form[2]
        return layouts


@dataclass
class _Shelf:
    budget: int | None
    kept: list[_Held] = field(default_factory=list)
    """By when they were last used, the newest last."""
    lent: list[_Held] = field(default_factory=list)
    inputs: Mapping[Path, str] = field(default_factory=dict)
    reused: int = 0


_shelves: list[_Shelf] = []
"""One where the process keeps models, none where it does not."""


def switch_on(budget: int | None = None) -> None:
    """From now on, keep models in this process: so many bytes, or a share of the device's."""
    _shelves[:] = [_Shelf(budget)]


def switch_off() -> None:
    """Let go of everything, and keep nothing more."""
    _shelves.clear()


def names() -> list[str]:
    """What is kept, for people."""
    return [f"{held.key.kind} {held.key.content[:12]}" for shelf in _shelves for held in shelf.kept]


def reused() -> int:
    """How many loads it has saved."""
    return sum(shelf.reused for shelf in _shelves)


@contextmanager
def among(inputs: Mapping[Path, str]) -> Iterator[None]:
    """Around a stage that reads these paths, whose hashes have just been checked."""
    for shelf in _shelves:
        shelf.inputs, shelf.lent = inputs, []
    try:
        yield
    finally:
        for shelf in _shelves:
            shelf.inputs, shelf.lent = {}, []


def take(kind: str, folder: Path, device: str) -> Any | None:
    """The model that a load of this folder would give, if it is here; it is the caller's now."""
    for shelf in _shelves:
        content = _content(shelf.inputs, folder)
        key = _Key(kind, device, content) if content else None
        for held in [held for held in shelf.kept if held.key == key]:
            shelf.kept.remove(held)
            if _form(held.model) == held.form and _numbers(held.model) == held.numbers:
                shelf.lent.append(held)
                shelf.reused += 1
                return held.model
    return None


def lend(model: Any, kind: str, folder: Path, device: str) -> None:
    """Remember a model that was just loaded, to keep it when its stage is done with it."""
    for shelf in _shelves:
        if content := _content(shelf.inputs, folder):
            key = _Key(kind, device, content)
            shelf.lent.append(_Held(key, model, _form(model), _numbers(model)))
            _make_room(shelf)


def note_saved(model: Any, folder: Path) -> None:
    """Remember that a model was saved: from now on it equals that folder, not the one it was."""
    for shelf in _shelves:
        for held in shelf.lent:
            if held.model is model:
                held.saved_to = folder


def keep(outs: Mapping[Path, str]) -> None:
    """At the end of a stage that went well and wrote these: keep what is worth it."""
    for shelf in _shelves:
        for held in shelf.lent:
            kept = _as_kept(held, outs)
            if kept is not None and kept.key not in {other.key for other in shelf.kept}:
                shelf.kept.append(kept)
        shelf.lent = []
        _make_room(shelf)


def _as_kept(held: _Held, outs: Mapping[Path, str]) -> _Held | None:
    """The model as it can be handed out again; None if it is not what a load would give."""
    held.model.eval()
    layouts = _layouts(held.model)
    for name, parameter in held.model.named_parameters():
        parameter.grad = None
        if layouts[name] != held.layouts.get(name):
            parameter.data = parameter.data.clone()  # decoding had joined it with others
    if _form(held.model) != held.form:
        return None
    numbers = _numbers(held.model)
    if numbers == held.numbers:
        return held
    if held.saved_to is None or not (content := _content(outs, held.saved_to)):
        return None
    computed = {name for name, _ in held.model.named_buffers()}
    if any(numbers[name] != held.numbers[name] for name in computed):
        return None
    if not _equals(held.model, held.saved_to):
        return None
    key = _Key(held.key.kind, held.key.device, content)
    return _Held(key, held.model, held.form, numbers)


def _equals(model: Any, folder: Path) -> bool:
    from stages.context import StageError
    from stages.engines.models.weights import ModelPart, check_weights

    try:
        check_weights(model, folder, ModelPart.ALL)
    except StageError:
        return False
    return True


def _content(hashes: Mapping[Path, str], folder: Path) -> str | None:
    """The hash of the artifact that a folder is or lies in, and where in it."""
    for path, digest in hashes.items():
        if folder.is_relative_to(path):
            return f"{digest} {folder.relative_to(path).as_posix()}"
    return None


def _make_room(shelf: _Shelf) -> None:
    """What is kept goes before what is in use, which is then merely not kept."""
    everything = [*shelf.kept, *shelf.lent]
    sizes = {id(held): _bytes(held.model) for held in everything}
    allowed = shelf.budget
    for held in everything:
        if allowed is None:
            allowed = _memory(held.key.device) // SHARE
        if sum(sizes.values()) <= allowed:
            return
        del sizes[id(held)]
        for of in (shelf.kept, shelf.lent):
            of[:] = [other for other in of if other is not held]


def _memory(device: str) -> int:
    """Bytes that the device has in all."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _form(model: Any) -> Any:
    """All of a model but its numbers: layers, settings, hooks, what of it learns."""
    layers = [
        (name, type(layer), {key: _gist(value) for key, value in vars(layer).items()})
        for name, layer in model.named_modules()
    ]
    weights = [
        (name, p.shape, p.dtype, p.device, p.requires_grad, _has_hooks(p))
        for name, p in model.named_parameters()
    ]
    return layers, weights, _layouts(model), model.config.to_dict()


def _has_hooks(weight: Any) -> bool:
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def _layouts(model: Any) -> dict[str, Any]:
    """A weight that lies inside a larger tensor computes the same, and is saved otherwise."""
    return {
        name: (p.stride(), p.storage_offset(), p.untyped_storage().nbytes(), p.is_inference())
        for name, p in model.named_parameters()
    }


def _gist(value: Any) -> Any:
    """A setting itself; of a collection, its size; of anything else, what it is."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return (type(value), len(value)) if isinstance(value, dict | list | set) else type(value)


def _numbers(model: Any) -> dict[str, int]:
    """A checksum of every tensor, computed where it is; any one changed number changes it."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: _checksum(tensor) for name, tensor in tensors}


def _checksum(tensor: Any) -> int:
    import torch

    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    raw = torch.nn.functional.pad(raw, (0, -len(raw) % 8)).view(torch.int64)
    total = 0
    for start in range(0, len(raw), _CHUNK):
        words = raw[start : start + _CHUNK]
        # Times an odd number, each another: no word can change without the sum, modulo 2**64.
        places = torch.arange(start, start + len(words), device=raw.device, dtype=torch.int64)
        total += int((words * (places * 2 + 1)).sum())
    return total & (1 << 64) - 1
