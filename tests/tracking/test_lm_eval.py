"""lm-eval's own package on a checkpoint of ours, with a task and data of our own: offline."""

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fake_clone
import pytest
from fake_clone import FakeClone

from pipelines.base.errors import LockstepError
from pipelines.commands.cli import main
from pipelines.config.params import load_params
from pipelines.identity.hashing import HashCache
from pipelines.results.lm_eval import (
    Request,
    _file_name,
    log_results,
    render,
    results_of,
    suffix_of,
)

MODEL = "artifacts/policies/sft/model"
SUMS = [
    (1, 2, "3", "7"),
    (20, 4, "99", "24"),
    (5, 6, "11", "12"),
    (7, 1, "5", "8"),
    (3, 3, "6", "1"),
]
TASK = """\
task: sums
dataset_path: json
dataset_kwargs:
  data_files: {test: DATA}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
"""


@pytest.fixture
def inside(clone: FakeClone, monkeypatch: pytest.MonkeyPatch) -> FakeClone:
    monkeypatch.chdir(clone.root)
    return clone


def save_model(folder: Path) -> None:
    """A Llama of a few hundred weights that knows digits."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from stages.data.tokenizer import build_character_tokenizer

    tokenizer = build_character_tokenizer(["0123456789+=;"])
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=1.0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def accuracy(folder: Path, docs: list[dict]) -> float:
    """How often the right choice is the likelier one, by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right = 0
    for doc in docs:
        sums = []
        for choice in doc["choices"]:
            whole = tokenizer(doc["question"] + choice, return_tensors="pt").input_ids
            start = len(tokenizer(doc["question"]).input_ids)
            with torch.no_grad():
                logprobs = model(whole).logits[0, :-1].log_softmax(-1)
            tokens = whole[0, 1:, None]
            sums.append(float(logprobs.gather(1, tokens)[start - 1 :].sum()))
        right += sums.index(max(sums)) == doc["gold"]
    return right / len(docs)


def asked(**settings: Any) -> Request:
    return Request("sft", "gsm8k", **settings)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")
def test_lm_eval_says_what_transformers_says_and_mlflow_gets_it(
    inside: FakeClone, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = inside.root / MODEL
    save_model(model)
    # The second is marked wrong, so that not all are right or all wrong.
    docs = [
        {
            "question": f"{a}+{b}=",
            "choices": [one, other],
            "gold": int((other == str(a + b)) != (place == 1)),
        }
        for place, (a, b, one, other) in enumerate(SUMS)
    ]
    data = inside.root / "sums.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (inside.root / "tasks").mkdir()
    (inside.root / "tasks/sums.yaml").write_text(TASK.replace("DATA", str(data)))
    digest = HashCache().of(model)
    monkeypatch.setattr(fake_clone, "DIGEST", digest)
    inside.run("evaluate_sft", {"accuracy": 0.5})
    inside.sync()
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(inside.root / "huggingface"))

    words = ["lm-eval", "sft", "--tasks", "sums", "--include-path", "tasks", "--device", "cpu"]
    capfd.readouterr()
    assert main([*words, "--limit", "4", "--mlflow", "--json"]) == 0

    found = json.loads(capfd.readouterr().out)
    assert found["results"]["sums"]["acc"] == accuracy(model, docs[:4])
    assert 0 < found["results"]["sums"]["acc"] < 1, "a number that says something"
    assert found["num_samples"] == {"sums": 4}
    assert found["model"] == {"path": MODEL, "hash": digest}
    kept = inside.root / "artifacts/lm_eval/sft"
    assert json.loads((kept / "sums.first-4.json").read_text()) == found
    assert (
        json.loads((kept / "sums.first-4.raw.json").read_text())["results"]["sums"]["sample_len"]
        == 4
    )
    assert sorted(path.name for path in kept.iterdir()) == [
        "sums.first-4.json",
        "sums.first-4.raw.json",
    ]
    metrics = inside.run_of("evaluate_sft").data.metrics
    assert metrics["lm_eval/sums.first-4/acc"] == found["results"]["sums"]["acc"]
    assert metrics["accuracy"] == 0.5

    other = shutil.copytree(model, inside.root / "other")
    (other / "config.json").write_text("{}")
    with pytest.raises(LockstepError, match="evaluated other weights than sft has now"):
        log_results(
            inside.repository, load_params(inside.root), "sft", HashCache().of(other), {}, ""
        )


def test_a_short_look_replaces_no_long_one_in_mlflow_either(inside: FakeClone) -> None:
    params = load_params(inside.root)
    inside.run("evaluate_sft")
    inside.sync()

    def log(accuracy: float, **settings: Any) -> None:
        results = {"gsm8k": {"exact_match/strict-match": accuracy}}
        suffix = suffix_of(asked(**settings))
        log_results(inside.repository, params, "sft", fake_clone.DIGEST, results, suffix)

    log(0.75)
    log(0.5, limit=50)
    log(0.25, num_fewshot=5, chat=True)
    metrics = inside.run_of("evaluate_sft").data.metrics
    assert {name: value for name, value in metrics.items() if name.startswith("lm_eval/")} == {
        "lm_eval/gsm8k/exact_match/strict-match": 0.75,
        "lm_eval/gsm8k.first-50/exact_match/strict-match": 0.5,
        "lm_eval/gsm8k.5-shot.chat/exact_match/strict-match": 0.25,
    }


def test_results_go_to_no_run_that_is_not_there(inside: FakeClone) -> None:
    params = load_params(inside.root)
    with pytest.raises(LockstepError, match=r"MLflow has no run of evaluate@iter_002 from this"):
        log_results(inside.repository, params, "iter_002", "digest", {}, "")


def test_what_is_missing_is_named_with_what_to_do(
    inside: FakeClone, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert main(["lm-eval", *words]) == 2
        return capsys.readouterr().err

    assert "no policy 'nobody'; there are sft, iter_001" in refused("nobody", "--tasks", "a")
    assert f"`dvc pull {MODEL}` fetches it" in refused("sft", "--tasks", "a")
    assert "--tasks is empty" in refused("sft", "--tasks", " , ")
    (inside.root / MODEL).mkdir(parents=True)
    (inside.root / MODEL / "tokenizer_config.json").write_text("{}")
    bare = Path(sys.base_prefix) / "bin/python3"
    said = refused("sft", "--tasks", "a", "--python", str(bare))
    assert "pip install -c constraints.txt -e '.[lm-eval]'" in said
    assert "No such file" in refused("sft", "--tasks", "a", "--python", "/no/python")


def test_a_failure_of_lm_eval_is_ours_too(
    inside: FakeClone, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An interpreter that has an lm_eval which cannot do it: the folder is as it was."""
    (inside.root / MODEL).mkdir(parents=True)
    (inside.root / MODEL / "tokenizer_config.json").write_text("{}")
    package = tmp_path / "packages/lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("raise SystemExit('no such task')")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert main(["lm-eval", "sft", "--tasks", "a/b", "--python", str(python)]) == 2
    said = capfd.readouterr().err
    assert "no such task" in said
    assert "lm-eval exited with status 1" in said
    assert list((inside.root / "artifacts/lm_eval/sft").iterdir()) == []


def test_numbers_are_taken_from_lm_evals_own_file() -> None:
    raw = {
        "results": {
            "gsm8k": {
                "name": "gsm8k",
                "alias": "gsm8k",
                "sample_len": 3,
                "exact_match,strict-match": 0.25,
                "exact_match_stderr,strict-match": 0.125,
                "exact_match,flexible-extract": 0.5,
                "exact_match_stderr,flexible-extract": "N/A",
            },
            "arc": {"acc,none": 1, "acc_stderr,none": 0.0},
        }
    }
    found = results_of(raw)
    assert found == {
        "gsm8k": {
            "exact_match/strict-match": 0.25,
            "exact_match_stderr/strict-match": 0.125,
            "exact_match/flexible-extract": 0.5,
        },
        "arc": {"acc": 1.0, "acc_stderr": 0.0},
    }
    assert render(found).splitlines() == [
        "gsm8k  exact_match/strict-match      0.2500 ± 0.1250",
        "gsm8k  exact_match/flexible-extract  0.5000",
        "arc    acc                           1.0000 ± 0.0000",
    ]


def test_results_that_were_asked_for_otherwise_have_a_file_of_their_own() -> None:
    def name(**settings: Any) -> str:
        return _file_name(["gsm8k"], asked(**settings))

    ways = [{}, {"limit": 5}, {"num_fewshot": 0}, {"num_fewshot": 5}, {"chat": True}]
    names = [name(**settings) for settings in ways]
    assert names[:3] == ["gsm8k", "gsm8k.first-5", "gsm8k.0-shot"]
    assert len(set(names)) == len(names)
    assert name(chat=True, limit=5, num_fewshot=2) == "gsm8k.2-shot.chat.first-5"
