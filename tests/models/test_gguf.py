"""GGUF files as a start: the weights, the rotary positions, and what is refused."""

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from stages.context import StageError
from stages.contracts.precision import Precision
from stages.engines.models.folders import load_policy
from tests.models.gguf_files import convert, tiny_llama, write_gguf
from tests.stages.conftest import Runner

IDS = torch.tensor([[5, 9, 40, 77, 12, 3]])


@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_of_a_file_is_in_the_folder_and_computes_the_same(tmp_path, tied):
    model = tiny_llama(tied=tied)
    file = write_gguf(tmp_path / "given" / "tiny.gguf", model)
    convert(file, tmp_path / "base")
    expected = model(input_ids=IDS).logits
    for loaded in (
        load_policy(tmp_path / "base"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
    ):
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
        # Not bit for bit: MKL may round by how weights are aligned, and a file's are so otherwise.
        torch.testing.assert_close(loaded(input_ids=IDS).logits, expected)


def test_a_quantised_file_is_the_model_up_to_its_rounding(tmp_path):
    model = tiny_llama()
    file = write_gguf(tmp_path / "given" / "tiny.gguf", model, quant="Q8_0")
    convert(file, tmp_path / "base")
    loaded = load_policy(tmp_path / "base").state_dict()
    for name, tensor in model.state_dict().items():
        bound = 0.0 if tensor.ndim == 1 else float(tensor.abs().max()) / 127
        assert float((loaded[name] - tensor).abs().max()) <= bound, name
    matrix = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(loaded[matrix], model.state_dict()[matrix])


def test_the_precision_is_that_of_the_params_and_the_bytes_repeat(tmp_path):
    file = write_gguf(tmp_path / "given" / "tiny.gguf", tiny_llama())
    for name in ("one", "two"):
        convert(file, tmp_path / name, Precision.BFLOAT16)
    assert Runner.contents(tmp_path / "one") == Runner.contents(tmp_path / "two")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert stored.dtype == torch.bfloat16
    weight = tiny_llama().model.layers[1].mlp.down_proj.weight
    assert torch.equal(stored.model.layers[1].mlp.down_proj.weight, weight.bfloat16())


def test_a_file_is_read_once_and_gguf_is_left_as_it_was(tmp_path, monkeypatch):
    read = []

    class Counting(gguf.GGUFReader):
        def __init__(self, path, *rest):
            read.append(path)
            super().__init__(path, *rest)

    monkeypatch.setattr(gguf, "GGUFReader", Counting)
    names = gguf.get_tensor_name_map
    write_gguf(tmp_path / "model.gguf", tiny_llama())
    convert(tmp_path, tmp_path / "base")
    assert len(read) == 1
    assert gguf.GGUFReader is Counting
    assert gguf.get_tensor_name_map is names


def test_a_run_starts_from_a_file_and_learns(runner):
    run = runner(
        model={"source": "folder", "folder": "models/tiny.gguf", "max_length": 64},
        sft={"epochs": 1, "batch_size": 32},
        rollout={"prompts": 2, "samples": 2, "max_new_tokens": 6, "batch_size": 4},
    )
    write_gguf(run.root / "models" / "tiny.gguf", tiny_llama())
    run.run("prepare")
    metrics = run.run("sft")
    run.run("rollout@iter_001")
    assert metrics["loss"] < 6
    assert (run.root / "artifacts/policies/sft/model/chat_template.jinja").is_file()


def test_files_that_cannot_be_taken_faithfully_are_refused(tmp_path):
    model = tiny_llama()
    two = tmp_path / "two"
    write_gguf(two / "a.gguf", model)
    write_gguf(two / "b.gguf", model)
    with pytest.raises(StageError, match=r"several GGUF files \(a\.gguf, b\.gguf\)"):
        convert(two, tmp_path / "out")
    scaled = write_gguf(tmp_path / "c.gguf", model, extra_tensor="rope_freqs.weight")
    with pytest.raises(StageError, match="rotary frequencies"):
        convert(scaled, tmp_path / "out")
    odd = write_gguf(tmp_path / "d.gguf", model, extra_tensor="blk.0.attn_sinks.weight")
    with pytest.raises(StageError, match="does not convert this kind of file faithfully"):
        convert(odd, tmp_path / "out")
    (tmp_path / "e.gguf").write_bytes(b"GGUF, not")
    with pytest.raises(StageError, match="not readable as GGUF"):
        convert(tmp_path / "e.gguf", tmp_path / "out")
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(StageError, match=r"not a \.gguf file"):
        convert(tmp_path / "weights.bin", tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.type", "linear"),
        ("rope.scaling.factor", 4.0),
        ("rope.scale_linear", 2.0),
        ("rope.scaling.attn_factor", 1.25),
    ],
)
def test_a_file_that_scales_its_rotary_frequencies_is_refused(tmp_path, key, value):
    said = {f"llama.{key}": value}
    file = write_gguf(tmp_path / "scaled.gguf", tiny_llama(), metadata=said)
    with pytest.raises(StageError, match=rf"rotary frequencies \(llama\.{key} is {value}\)"):
        convert(file, tmp_path / "out")


def test_a_file_that_says_that_nothing_is_scaled_is_taken(tmp_path):
    said = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 1.0}
    convert(write_gguf(tmp_path / "a.gguf", tiny_llama(), metadata=said), tmp_path / "a")
    said = {"llama.rope.scale_linear": 0.0, "llama.rope.freq_base": 500_000.0}
    convert(write_gguf(tmp_path / "b.gguf", tiny_llama(), metadata=said), tmp_path / "b")
    rotary = load_policy(tmp_path / "b").config.rope_parameters
    assert rotary == {"rope_theta": 500_000.0, "rope_type": "default"}


def test_a_rotary_base_that_is_not_the_models_is_refused(tmp_path, monkeypatch):
    """transformers reads it of most architectures, but not of all."""
    monkeypatch.delitem(GGUF_CONFIG_MAPPING["llama"], "rope.freq_base")
    convert(write_gguf(tmp_path / "usual.gguf", tiny_llama()), tmp_path / "usual")
    said = {"llama.rope.freq_base": 500_000.0}
    file = write_gguf(tmp_path / "other.gguf", tiny_llama(), metadata=said)
    with pytest.raises(StageError, match=r"rotary base 500000 \(llama\.rope\.freq_base\)"):
        convert(file, tmp_path / "out")
