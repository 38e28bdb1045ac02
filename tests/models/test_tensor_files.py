"""Weights in files: one or many, with the bytes that the libraries would write."""

import errno
import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM

from stages.engines.models import folders, tensor_files
from stages.engines.models.folders import content_hash, hash_lines, load_policy, save_model
from stages.engines.models.tensor_files import (
    Form,
    natural,
    stored_tensors,
    tensor_file_names,
    write_tensor_files,
)
from stages.engines.processes.ranks import Ranks
from stages.engines.training.learner import Optimization
from stages.engines.training.optimizer import Learner
from stages.engines.training.sampled import Elsewhere, outline_of, policy_hash
from stages.engines.training.saving import sampling_hash, save_learner
from tests.models.families import FAMILIES, write_family

KINDS = (
    torch.float32,
    torch.bool,
    torch.bfloat16,
    torch.int64,
    torch.float64,
    torch.uint8,
    torch.float16,
    torch.int32,
    torch.int8,
)


def write(folder, tensors, **options):
    folder.mkdir(exist_ok=True)
    forms = {name: Form.of(tensor) for name, tensor in tensors.items()}
    return write_tensor_files(folder, "model", forms, lambda name, _: tensors[name], **options)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_one_file_has_the_bytes_of_the_library(tmp_path, metadata):
    tensors = {f"layer.{i}.größe": torch.randn(3, i).to(kind) for i, kind in enumerate(KINDS)} | {
        "transposed": torch.randn(4, 3).T,
        "number": torch.tensor(1.5),
        "b": torch.ones(1),
    }
    hashes = write(tmp_path, tensors, metadata=metadata)
    expected = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
    assert contents(tmp_path) == {"model.safetensors": expected}
    assert hashes == {"model.safetensors": hashlib.sha256(expected).hexdigest()}


def test_no_tensors_are_a_file_too(tmp_path):
    write(tmp_path, {})
    assert load_file(tmp_path / "model.safetensors") == {}
    assert stored_tensors(tmp_path, "model") == {}


def test_layers_are_sorted_by_their_numbers():
    names = ["a.10.w", "a.9.w", "b", "a.w", "a.9.v2", "a.9.v10"]
    assert sorted(names, key=natural) == ["a.9.v2", "a.9.v10", "a.9.w", "a.10.w", "a.w", "b"]


def test_an_index_that_cannot_be_written_is_an_error_of_all_ranks(tmp_path, monkeypatch):
    """They wait for each other once more: rank 0, which writes it, tells them first."""

    class Telling(Ranks):
        def gather(self, value):
            told.append(value)
            return [value]

    def full(*_):
        raise OSError(errno.ENOSPC, "no room at all")

    told = []
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 100)
    monkeypatch.setattr(tensor_files, "write_json", full)
    with pytest.raises(OSError, match="no room at all"):
        write(tmp_path, {f"layer.{i}": torch.ones(20) for i in range(3)}, ranks=Telling())
    assert told[0][1] == (errno.ENOSPC, "[Errno 28] no room at all")


def test_several_files_are_cut_by_size_and_read_by_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "FILE_BYTES", 100)
    tensors = {f"layer.{i}": torch.randn(5, 2) for i in range(7)} | {"large": torch.randn(50)}
    hashes = write(tmp_path, tensors)
    names = tensor_file_names(tmp_path, "model")
    assert names == [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
    assert hashes == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in names
    }
    sizes = [sum(t.nbytes for t in load_file(tmp_path / name).values()) for name in names]
    assert sizes == [200, 80, 80, 80, 40]
    stored = stored_tensors(tmp_path, "model")
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name].shape == tensor.shape
        assert torch.equal(stored[name].whole(), tensor)
        assert torch.equal(stored[name][2:4], tensor[2:4])


@pytest.mark.parametrize(
    ("family", "file_bytes"), [*((family, 4_000) for family in FAMILIES), ("qwen2", 10**9)]
)
def test_a_learner_is_saved_as_transformers_would_save_the_model(
    tmp_path, monkeypatch, family, file_bytes
):
    """Every family, with one file and with many: whatever is tied, left out or arranged anew."""
    for module in (tensor_files, folders):
        monkeypatch.setattr(module, "FILE_BYTES", file_bytes)
    base = write_family(tmp_path / "base", family)
    save_model(load_policy(base), tmp_path / "theirs", tokenizer_from=base)
    model = load_policy(base)
    learner = Learner(model, Optimization(learning_rate=1e-3, max_grad_norm=1.0))
    save_learner(learner, tmp_path / "ours", tokenizer_from=base)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(again[name], one) for name, one in model.state_dict().items())
    assert sampling_hash(learner) == content_hash(model)
    names, weights = zip(*learner.computed_weights(), strict=True)
    of_weights = hash_lines(zip(names, weights, strict=True), lambda _, weight: weight)
    lines = dict(zip(names, of_weights, strict=True))
    far = Elsewhere(lambda _: iter(()))
    far.outline = outline_of(learner)
    assert policy_hash(learner, lines) == policy_hash(far, lines) == content_hash(model)
    if file_bytes == 4_000:
        index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 3


def test_a_disk_that_fails_is_an_error_and_no_hang(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path, {str(i): torch.ones(10) for i in range(20)})
