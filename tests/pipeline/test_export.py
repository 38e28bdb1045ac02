"""`lockstep export`: a folder that other tools load, with a card that says what is true."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipelines.base.repository import Repository
from pipelines.dvc_repo.lock_file import read_stages
from pipelines.export import card
from pipelines.export.folder import dtypes_of
from pipelines.export.provenance import find_policy


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def outs_of(root: Path, stage: str) -> dict[str, str]:
    return {out["path"]: out["md5"] for out in read_stages(root)[stage]["outs"]}


def test_a_policy_is_exported_whole_and_the_same_each_time(finished: Any, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    said = json.loads(finished.run("lockstep", "export", "iter_001", str(target), "--json").stdout)
    policy = finished.root / "artifacts/policies/iter_001/model"
    exported = contents(target)
    assert {name: exported[name] for name in contents(policy)} == contents(policy)
    assert set(exported) - set(contents(policy)) == {"README.md", "lineage.json"}
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in exported.items()}
    assert said["files"] == hashes
    assert (
        said["hash"]
        == outs_of(finished.root, "policy_update@iter_001")["artifacts/policies/iter_001/model"]
    )

    again = finished.run("lockstep", "export", "iter_001", str(target), check=False)
    assert again.returncode == 2
    assert "already exists" in again.stdout
    (target / "left over").write_text("from before")
    finished.run("lockstep", "export", "iter_001", str(target), "--force")
    assert contents(target) == exported
    assert [path.name for path in target.parent.iterdir()] == ["model"], "nothing is left aside"


def test_the_card_states_data_params_metrics_hashes_and_lineage(
    finished: Any, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    finished.run("lockstep", "export", "iter_001", str(target))
    text = (target / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.library_name == "transformers"
    assert {"lockstep", "rlhf", "ppo"} <= set(card.data.tags)
    evaluation = json.loads((finished.root / "metrics/evaluations/iter_001.json").read_text())
    results = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert results["reward_mean"] == evaluation["reward_mean"]
    assert results["accuracy"] == evaluation["accuracy"]
    of_sft = json.loads((finished.root / "metrics/evaluations/sft.json").read_text())
    measured = f"| reward_mean | {evaluation['reward_mean']:.6g} | {of_sft['reward_mean']:.6g} |"
    assert measured in text

    prepared = json.loads((finished.root / "metrics/prepare.json").read_text())
    assert f"| num_demonstrations | {prepared['num_demonstrations']} |" in text
    for stage in ("prepare", "sft", "rollout@iter_001", "policy_update@iter_001"):
        assert f"| `{stage}` |" in text
        for digest in outs_of(finished.root, stage).values():
            assert digest in text, stage
    assert (
        "evaluate" not in json.loads((target / "lineage.json").read_text())["stages"][-1]["stage"]
    )
    weights = hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()
    assert f"| `model.safetensors` (sha256) | `{weights}` |" in text
    assert "| `model.hidden_size` | `32` |" in text, "it is not at its default"
    assert "| `seed` |" not in text, "it is at its default"
    assert "\nseed: 17\n" in text
    assert str(finished.root) not in text, "where it was written is nobody's business"


def test_the_snippet_of_the_card_runs_and_answers(
    finished: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "model"
    finished.run("lockstep", "export", "sft", str(target))
    _, _, rest = (target / "README.md").read_text().partition("```python\n")
    snippet, _, _ = rest.partition("```")
    monkeypatch.chdir(target)
    capsys.readouterr()
    # Here, where its imports have been paid for.
    exec(compile(snippet.replace("Your question", "2+3="), "the card", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_weights_are_rounded_when_another_type_is_asked_for(finished: Any, tmp_path: Path) -> None:
    target = tmp_path / "model"
    finished.run("lockstep", "export", "sft", str(target), "--dtype", "bfloat16")
    policy = finished.root / "artifacts/policies/sft/model"
    before = load_file(policy / "model.safetensors")
    after = load_file(target / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)
    assert AutoModelForCausalLM.from_pretrained(target).dtype == torch.bfloat16
    assert "converted from float32 to bfloat16" in (target / "README.md").read_text()
    other = tmp_path / "again"
    finished.run("lockstep", "export", "sft", str(other), "--dtype", "bfloat16")
    assert contents(target) == contents(other)


def test_the_card_says_what_the_weights_are(finished: Any, tmp_path: Path) -> None:
    found = find_policy(Repository(finished.root), "sft")
    mixed = {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(3)}
    save_file(mixed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert dtypes_of([tmp_path / "model.safetensors"]) == "bfloat16 and float32"
    assert "by supervised fine-tuning" in card.render(found, {}, "", adapter=False)
    given = replace(found, params={**found.params, "sft.epochs": 0})
    assert "as it was given (sft.epochs is 0)" in card.render(given, {}, "", adapter=False)


def test_a_policy_of_an_older_commit_comes_out_of_the_cache(finished: Any, tmp_path: Path) -> None:
    finished.run("git", "tag", "before")
    policy = finished.root / "artifacts/policies/iter_001/model"
    before = contents(policy)
    shutil.rmtree(policy)
    shutil.rmtree(finished.root / ".lockstep" / "jobs")
    finished.set_params(policy_update__learning_rate=1e-3)
    target = tmp_path / "model"
    finished.run("lockstep", "export", "iter_001", str(target), "--rev", "before")
    assert "Weights are in float32." in (target / "README.md").read_text()
    exported = contents(target)
    assert {name: exported[name] for name in before} == before
    assert "0.001" not in (target / "README.md").read_text().partition("<details>")[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("iter_009", "out"), "iter_009"),
        (("rollouts@iter_001", "out"), "is not a policy"),
        (("sft", "artifacts/mine"), "among the artifacts"),
        (("sft", "out", "--adapter"), "is no adapter"),
    ],
)
def test_what_cannot_be_exported_is_said_and_nothing_is_left(
    finished: Any, words: tuple[str, ...], message: str
) -> None:
    done = finished.run("lockstep", "export", *words, check=False)
    assert done.returncode == 2
    assert message in done.stdout
    assert not (finished.root / words[1]).exists()
    assert not list(finished.root.glob(".*out*"))
