"""A model that stays in memory is handed out only where a fresh load would give the same."""

import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.data.batching import collate
from stages.engines.forward.packed import ForwardSettings, configure_forward, hidden_states
from stages.engines.models import resident
from stages.engines.models.folders import content_hash, load_policy, save_model
from stages.engines.processes import clean_slate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=12, num_hidden_layers=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


@pytest.fixture(autouse=True)
def _switched_on() -> Iterator[None]:
    resident.switch_on()
    yield
    resident.switch_off()


@contextmanager
def stage(
    inputs: Mapping[Path, str], outs: Mapping[Path, str] | None = None
) -> Iterator[Callable[[], None]]:
    """A stage as the worker runs it; what is yielded is its good end."""
    with resident.among(inputs):
        yield lambda: resident.keep(outs or {})


def kept(folder: Path, content: str, change: Callable[[Any], None] = lambda _: None) -> Any:
    """The model of a stage that loads one, changes it and ends well."""
    with stage({folder: content}) as end:
        model = load_policy(folder)
        change(model)
        end()
    return model


def train(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.25


def test_a_model_that_nobody_changed_is_handed_to_the_next_stage(folder: Path) -> None:
    with stage({folder: "a"}) as end:
        first = load_policy(folder)
        assert load_policy(folder) is not first, "it has an owner"
        end()
    assert len(resident.names()) == 1
    with stage({folder: "a"}):
        assert load_policy(folder) is first
    assert resident.names() == [], "a stage that did not end well gives nothing back"
    with stage({folder: "a"}):
        assert load_policy(folder) is not first


def test_the_hash_decides_and_not_the_place(folder: Path) -> None:
    first = kept(folder, "a")
    assert kept(folder, "b") is not first
    elsewhere = folder.rename(folder.with_name("elsewhere"))
    with stage({elsewhere.parent: "c"}) as end:
        assert load_policy(elsewhere) is not first, "another place in another artifact"
        end()
    with stage({elsewhere: "a"}):
        assert load_policy(elsewhere) is first


def test_a_trained_model_is_kept_only_as_what_it_was_saved_as(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with stage({folder: "a"}, {out: "b"}) as end:
        model = load_policy(folder)
        train(model)
        save_model(model, out, tokenizer_from=folder)
        end()
    with stage({folder: "a", out: "b"}) as end:
        assert load_policy(folder) is not model
        assert load_policy(out) is model
        assert content_hash(model) == content_hash(load_policy(out))
        train(model)
        end()
    with stage({out: "b"}):
        assert load_policy(out) is not model, "trained and not saved: it equals nothing"


def test_a_model_that_is_not_what_was_saved_is_not_kept(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with stage({folder: "a"}, {out: "b"}) as end:
        model = load_policy(folder)
        train(model)
        save_model(model, out, tokenizer_from=folder)
        train(model)
        end()
    assert resident.names() == []


@pytest.mark.parametrize(
    "settings",
    [ForwardSettings(checkpoint_activations=True), ForwardSettings(compile=True, micro_tokens=64)],
    ids=["checkpointed", "compiled"],
)
def test_a_model_is_kept_however_it_was_run(
    folder: Path, settings: ForwardSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))

    def run(model: Any) -> None:
        configure_forward(model, settings)
        hidden_states(model, collate([[3, 4]], [[5, 6]], 0)).sum().backward()

    model = kept(folder, "a", run)
    with stage({folder: "a"}):
        assert load_policy(folder) is model


def flip_one_bit(model: Any) -> None:
    raw = model.lm_head.weight.data.view(-1).view(torch.int32)
    raw[7] ^= 1


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook": lambda model: model.model.register_forward_hook(lambda *_: None),
    "a hook on a weight": lambda model: model.lm_head.weight.register_post_accumulate_grad_hook(
        lambda _: None
    ),
    "a frozen weight": lambda model: model.lm_head.weight.requires_grad_(False),
    "a setting": lambda model: setattr(model.config, "use_cache", False),
    "one bit": flip_one_bit,
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_that_differs_in_anything_is_not_handed_out(folder: Path, change: Any) -> None:
    changed_in_its_stage, changed_later = kept(folder, "a", change), kept(folder, "b")
    change(changed_later)
    with stage({folder: "a"}):
        assert load_policy(folder) is not changed_in_its_stage
    with stage({folder: "b"}):
        assert load_policy(folder) is not changed_later


def join_with_another(weight: torch.Tensor) -> None:
    weight.data = torch.cat([weight.data, weight.data])[: len(weight)]


def test_weights_that_decoding_joined_are_apart_again(folder: Path) -> None:
    model = kept(folder, "a", lambda model: join_with_another(model.lm_head.weight))
    weight = model.lm_head.weight
    assert weight.untyped_storage().nbytes() == weight.nbytes
    with stage({folder: "a"}):
        assert load_policy(folder) is model
        join_with_another(weight)
        resident.keep({})
        join_with_another(weight)
    with stage({folder: "a"}):
        assert load_policy(folder) is not model, "changed while it was kept"


def test_what_is_kept_stays_within_its_budget(folder: Path) -> None:
    size = folder.joinpath("model.safetensors").stat().st_size
    resident.switch_on(budget=int(2.5 * size))
    for content in "abc":
        kept(folder, content)
    assert [name[-3] for name in resident.names()] == ["b", "c"]
    resident.switch_on(budget=size // 2)
    kept(folder, "a")
    assert resident.names() == []


def test_elsewhere_nothing_is_kept(folder: Path) -> None:
    resident.switch_off()
    first = kept(folder, "a")
    with stage({folder: "a"}):
        assert load_policy(folder) is not first


def test_a_process_is_put_back_to_what_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KEPT", "before")
    restore = clean_slate.remember()

    def look() -> list[Any]:
        return [
            dict(os.environ),
            Path.cwd(),
            signal.getsignal(signal.SIGTERM),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            (random.random(), float(numpy.random.rand()), float(torch.rand(()))),
        ]

    before = look()
    os.environ.update(KEPT="after", NEW="new")
    os.chdir(tmp_path)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.use_deterministic_algorithms(not before[3])
    torch.backends.cudnn.benchmark = not before[4]
    torch.set_num_threads(before[5] + 1)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(3)
    restore()
    clean_slate.free_memory()
    assert look() == before
