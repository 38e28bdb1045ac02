"""What leaves a run: adapters merged or beside their base, and what the card takes from others."""

import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from pipelines.base.errors import LockstepError
from pipelines.export import card
from pipelines.export.folder import write_folder
from pipelines.export.provenance import Provenance
from pipelines.identity.spec import Artifact
from pipelines.lineage.stage_run import StageRun
from stages.contracts.lora import LoraParams, LoraSave
from stages.engines.models import exported
from stages.engines.models.folders import load_policy, save_model
from stages.engines.models.lora import open_for_training
from tests.models.families import write_family
from tests.report.reader import MARKED_UP, NAMES, Cells, shown

LORA = LoraParams(rank=2, alpha=4.0, save=LoraSave.ADAPTER)
IDS = torch.tensor([[1, 5, 9, 12, 7]])


def provenance(folder: Path, **changes) -> Provenance:
    """Of the files in a folder, with as little history as there can be."""
    path = "artifacts/policies/iter_001/model"
    stage_run = StageRun("policy_update@iter_001", {}, {}, {}, {path: "0" * 32})
    values = {
        "policy": "iter_001",
        "artifact": Artifact(path, "0" * 32),
        "stage_run": stage_run,
        "files": {
            item.relative_to(folder).as_posix(): item
            for item in sorted(folder.rglob("*"))
            if item.is_file()
        },
        "stages": (stage_run,),
        "given": (),
        "params": {"rollout.max_new_tokens": 3},
        "evaluation": {},
        "of_sft": {},
        "data": {},
        "sources": (),
        "base_card": {},
        "licences": {},
    }
    return Provenance(**{**values, **changes})


@pytest.fixture
def adapter(tmp_path):
    """An adapter that has learnt something, beside its base."""
    base = write_family(tmp_path / "base", "llama")
    model = open_for_training(load_policy, base, "cpu", LORA, seed=1)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_()
    save_model(model, tmp_path / "policy", tokenizer_from=base, lora=LORA)
    return tmp_path / "policy"


def run_snippet(folder: Path, monkeypatch) -> str:
    """The card's own lines, in its folder."""
    code = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    said = []
    monkeypatch.chdir(folder)
    exec(code[1], {"print": said.append})
    return said[0]


def test_an_adapter_leaves_merged_unless_it_is_wanted_as_one(adapter, tmp_path, monkeypatch):
    expected = load_policy(adapter)
    (tmp_path / "cached").write_text("Do what you like.")
    found = provenance(adapter, licences={"LICENSE.txt": tmp_path / "cached"})
    write_folder(found, tmp_path / "merged")
    assert (tmp_path / "merged" / "LICENSE.txt").read_text() == "Do what you like."
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert all(map(torch.equal, merged.parameters(), expected.parameters()))
    # Not bit for bit: MKL may round by how weights are aligned, and a file's are so otherwise.
    torch.testing.assert_close(merged(input_ids=IDS).logits, expected(input_ids=IDS).logits)
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    text = (tmp_path / "merged" / "README.md").read_text()
    assert "The adapter is merged into its base." in text

    write_folder(found, tmp_path / "apart", adapter=True)
    kept = {name: (tmp_path / "apart" / name).read_bytes() for name in found.files}
    assert kept == {name: path.read_bytes() for name, path in found.files.items()}
    assert ModelCard((tmp_path / "apart" / "README.md").read_text()).data.library_name == "peft"
    run_snippet(tmp_path / "apart", monkeypatch)


def test_an_adapter_is_not_made_where_there_is_none(tmp_path):
    whole = provenance(write_family(tmp_path / "whole", "llama"))
    with pytest.raises(LockstepError, match="is no adapter"):
        write_folder(whole, tmp_path / "out", adapter=True)


def test_an_adapter_may_leave_merged_and_rounded(adapter, tmp_path):
    """Written in this process, where the test before has it done in another, as `export` does."""
    exported.rewrite(adapter, tmp_path / "merged", "bfloat16")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.bfloat16
    for one, other in zip(merged.parameters(), load_policy(adapter).parameters(), strict=True):
        assert torch.equal(one, other.bfloat16())


@pytest.mark.parametrize("options", [{"adapter": True}, {"link": True}])
def test_the_base_models_licence_comes_along(adapter, tmp_path, options):
    (tmp_path / "cached").write_text("Do what you like.")
    found = provenance(adapter, licences={"LICENSE.txt": tmp_path / "cached"})
    write_folder(found, tmp_path / "out", **options)
    assert (tmp_path / "out" / "LICENSE.txt").read_text() == "Do what you like."


def test_a_licence_of_the_policys_own_stays(tmp_path):
    whole = write_family(tmp_path / "whole", "llama")
    (whole / "LICENSE").write_text("its own")
    (tmp_path / "of the base").write_text("another")
    found = provenance(whole, licences={"LICENSE": tmp_path / "of the base"})
    write_folder(found, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "its own"


def test_the_datasets_are_those_of_a_hub_that_were_trained_on():
    params = {
        "prepare.source": "files",
        "prepare.folder": "data",
        "prepare.files.demonstrations": ["a.jsonl", {"dataset": "us/chats", "revision": "0" * 40}],
        "prepare.files.prompts.dataset": "us/maths",
        "prepare.files.held_out.dataset": "us/tests",
    }
    found = provenance(Path("nowhere"), params=params)
    data = ModelCard(card.render(found, {}, "", adapter=False)).data
    assert data.datasets == ["us/chats", "us/maths"]
    of_files = provenance(Path("nowhere"), params={**params, "prepare.source": "arithmetic"})
    assert ModelCard(card.render(of_files, {}, "", adapter=False)).data.datasets is None


def test_the_licence_is_the_base_models_and_text_stays_text():
    found = provenance(
        Path("nowhere"),
        base_card={"license": "apache-2.0", "language": ["en", "no"]},
        params={"model.source": "folder", "model.folder": "models/tiny: a | b"},
        evaluation={"accuracy": 0.5, "kl_to_reference": 1e-05, "num_prompts": 4},
        of_sft={"accuracy": 0.25, "num_prompts": 4},
        sources=({"role": "prompts", "source": "a|b.csv", "kept": 3, "dropped": {"duplicate": 2}},),
    )
    text = card.render(found, {}, "", adapter=False)
    data = ModelCard(text).data
    assert data.license == "apache-2.0"
    assert data.language == ["en", "no"]
    assert data.base_model == "tiny: a | b"
    assert [result.metric_value for result in data.eval_results] == [0.5, 1e-05]
    assert "| accuracy | 0.5 | 0.25 |" in text
    assert "| prompts | a\\|b.csv | 3 | duplicate: 2 |" in text
    assert card.render(found, {}, "", adapter=False) == text


@pytest.mark.parametrize("name", NAMES)
def test_names_of_sources_and_files_are_shown_as_they_are(name):
    found = provenance(
        Path("nowhere"),
        params={"prepare.folder": name, "model.source": "folder", "model.folder": name},
        sources=({"role": "prompts", "source": name, "kept": 3, "dropped": {"duplicate": 2}},),
    )
    cells = Cells(card.render(found, {}, "", adapter=False).split("---\n", 2)[2])
    assert shown(name) in cells.texts
    assert not cells.tags & MARKED_UP
