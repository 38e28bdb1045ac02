"""The cost model of docs/scaling.md: it reads results, names missing ones, and makes the page."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import cost_model, layouts
from benchmarks.cost_model import (
    MODELS,
    WORK,
    online_exchange_s,
    online_row,
    plans,
    staged_row,
)
from benchmarks.scaling import main, rates
from pipelines.base.errors import LockstepError
from pipelines.config.exchange import LARGE, advice_on_exchange
from pipelines.config.memory import refuse_what_cannot_fit
from pipelines.config.profiles import load_profile
from stages.contracts.params import Params
from stages.engines.generation.vllm_worker import Checked
from stages.memory.shape import decoder, read_shape

ROOT = Path(__file__).resolve().parents[2]
GPU = "NVIDIA H200"
RESULTS = {
    "training.json": {
        "a": {
            "model": "1.1b",
            "stage": "sft",
            "way": "packed",
            "checkpoint_activations": False,
            "mfu": 0.5,
            "micro_tokens": 32768,
            "peak_gigabytes": 65.0,
            "hardware": GPU,
        }
    },
    "generation.json": {
        "b": {
            "model": "1.1b",
            "lengths": "full",
            "slots": 512,
            "prompt_tokens": 25,
            "max_new_tokens": 256,
            "tokens_per_second": 80_000,
            "hardware": GPU,
        }
    },
    "artifacts.json": {
        "16 cores": {
            "gb_per_s_by_ranks": {
                "8": {"write_and_hash": 1.5, "read_from_disk": 2.0, "read_from_page_cache": 20.0}
            },
        },
        "2 cores": {"gb_per_s_by_ranks": {"1": {"write_and_hash": 0.5}}},
    },
    "weight_transfer.json": {
        "8b:apart": {
            "gigabytes": 16.0,
            "through_memory": {"take_seconds": 0.16, "compare_seconds": 0.16},
            "hardware": GPU,
        }
    },
    "online.json": {
        "c": {
            "model": "8b",
            "generate_seconds": 4.0,
            "tokens_per_second": 6000.0,
            "hardware": GPU,
        }
    },
}
PAGE = "# Scaling\n<!-- benchmarks/scaling.py -->\n<!-- end -->\nThe end.\n"


@pytest.fixture
def results(tmp_path):
    for name, values in RESULTS.items():
        (tmp_path / name).write_text(json.dumps(values), encoding="utf-8")
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    return tmp_path


def scaling(*words, results=None):
    """As the command says and ends, in this process."""
    where = ["--results", results, "--page", results / "page.md"] if results else []
    said, status = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(said):
        patched.setattr(sys, "argv", ["scaling.py", *map(str, where), *words])
        try:
            main()
        except SystemExit as end:
            status, error = 1, str(end)
        else:
            error = ""
    return SimpleNamespace(returncode=status, stdout=said.getvalue(), stderr=error)


def plans_of(results=None):
    """By model and form."""
    said = json.loads(scaling("--json", results=results).stdout)
    found = {}
    for plan in said["plans"]:
        found.setdefault((plan["model"], plan["form"]), []).append(plan)
    return found


def test_the_fewest_nodes_hold_each_model_and_more_nodes_are_no_slower(results):
    found = plans_of(results)
    models = ["7B", "70B", "400B MoE"]
    assert list(found) == [(model, form) for model in models for form in ("staged", "online")]
    for (_, form), few in found.items():
        runs = form == "staged" or not few[0]["stops"]
        assert not runs or all(plan["gpu_gb"] <= 0.85 * 141 for plan in few)
        assert [plan["nodes"] for plan in few] == [few[0]["nodes"] * n for n in (1, 2, 4)]
        assert few[0]["generate_s"] >= few[1]["generate_s"] >= few[2]["generate_s"]
    fewest = [found[model, "staged"][0]["nodes"] for model in models]
    assert fewest == sorted(fewest)
    assert fewest[0] < fewest[-1]


def test_weights_that_go_through_memory_hardly_count():
    """Of the recorded results: at 7B on one node at most 5 % of a step, at 70B on eight 10 %.

    Checkpoints, where they are due, are in it.
    """
    found = plans_of()
    (one_node,) = [plan for plan in found["7B", "online"] if plan["nodes"] == 1]
    (eight,) = [plan for plan in found["70B", "online"] if plan["nodes"] == 8]
    assert one_node["exchange_percent"] <= 5
    assert not one_node["stops"]
    assert eight["exchange_percent"] <= 10


def staged_percent(model, nodes):
    staged = cost_model.plan(model, cost_model.Form.STAGED, nodes, rates(), WORK)
    return staged.exchange_percent


def test_who_would_send_a_large_policy_by_the_disk_is_told_to_keep_it_in_memory():
    """From the size on at which that takes about half of an iteration, by the recorded results."""
    large = decoder(4096, 11_008, 27, 32, 8, 32_000)
    assert large.weights == pytest.approx(LARGE, rel=0.05)
    assert staged_percent(cost_model.Model("large", large), 1) > 40
    assert staged_percent(cost_model.Model("large", large), 2) > 50
    assert staged_percent(MODELS[0], 1) > 50
    staged = Params.model_validate({"rl": {"iterations": {"a": {"policy": "sft"}}}})
    steps = {"a": {"policy": "sft", "steps": 2}}
    fused = Params.model_validate({"rl": {"iterations": {}, "online": steps}})
    assert "by the disk, which takes about half" in str(advice_on_exchange(staged, large))
    quiet = [(fused, large), (staged, decoder(2048, 5632, 22, 32, 4, 32_000)), (staged, None)]
    assert [advice_on_exchange(*each) for each in quiet] == [None] * 3


def test_a_slower_disk_makes_staged_steps_longer_and_checkpoints_of_online(results):
    before = plans_of(results)
    slower = json.loads(json.dumps(RESULTS["artifacts.json"]))
    slower["16 cores"]["gb_per_s_by_ranks"]["8"] |= {"write_and_hash": 0.75, "read_from_disk": 1.0}
    (results / "artifacts.json").write_text(json.dumps(slower), encoding="utf-8")
    after = plans_of(results)
    old, new = (found["7B", "staged"][0] for found in (before, after))
    assert new["exchange_s"] > 1.8 * old["exchange_s"]
    old, new = (found["7B", "online"][0] for found in (before, after))
    assert new["exchange_s"] == old["exchange_s"]
    assert new["checkpoint_s"] == pytest.approx(2 * old["checkpoint_s"], rel=0.02)


def test_a_sampler_over_several_gpus_costs_what_giving_vllm_all_weights_was_measured_to(results):
    before = plans_of(results)
    slower = json.loads(json.dumps(RESULTS["weight_transfer.json"]))
    slower["8b:apart"]["through_memory"] |= {"take_seconds": 1.6, "compare_seconds": 0.8}
    (results / "weight_transfer.json").write_text(json.dumps(slower), encoding="utf-8")
    after = plans_of(results)
    one, other = (found["70B", "online"][1] for found in (before, after))
    (weights,) = [2e-9 * model.total for model in MODELS if model.name == "70B"]
    more = weights / 10 + weights / 20 - 2 * weights / 100
    assert other["exchange_s"] - one["exchange_s"] == pytest.approx(more, abs=0.11)
    # Nothing else is vLLM's: a policy that fits a GPU is sampled with torch.
    assert after["7B", "online"] == before["7B", "online"]
    assert after["70B", "staged"] == before["70B", "staged"]


def test_ranks_share_the_hash_of_what_vllm_is_given():
    """With a hash that generation does not hide, twice the nodes need half as long."""
    found = replace(rates(), sampler_hash_gb_per_s=0.1)
    (model,) = [model for model in MODELS if model.name == "70B"]
    hidden = [online_exchange_s(model, nodes, 8, rates(), 1e9) for nodes in (4, 8)]
    shown = [online_exchange_s(model, nodes, 8, found, 0.0) for nodes in (4, 8)]
    of_four, of_eight = (
        with_hash - without for with_hash, without in zip(shown, hidden, strict=True)
    )
    assert of_four == pytest.approx(2 * of_eight)
    assert of_four == pytest.approx(2 * model.total / 0.1e9 / 4)


def rows():
    """The rows of docs/scaling.md as they are laid out, and what the page says of each."""
    for model in MODELS:
        for plan in plans(model, rates()):
            layout = staged_row if plan.form == "staged" else online_row
            row = layout(model, plan.nodes, WORK)
            name = f"{plan.model} {plan.form} {plan.nodes}"
            yield pytest.param(row, plan.stops, id=name)


@pytest.mark.parametrize(("row", "stops"), list(rows()))
def test_the_program_refuses_what_the_page_says_cannot_run_and_nothing_else(tmp_path, row, stops):
    """By the row's profile and model as files, the way that `lockstep plan` and `run` ask."""
    (tmp_path / "slurm_profiles").mkdir()
    (tmp_path / "slurm_profiles/row.yaml").write_text(json.dumps(layouts.profile(row)))
    profile = load_profile(tmp_path, "row")
    made = layouts.params(row)
    model = made.model.model_copy(update={"source": "folder", "folder": "policy"})
    made = made.model_copy(update={"model": model})
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy/config.json").write_text(json.dumps(config_of(row.shape)))
    assert read_shape(tmp_path / "policy").weights == pytest.approx(row.shape.weights, rel=0.05)

    by_memory = [reason for reason in stops.split("; ") if " needs " in reason]
    stages = {reason.split(" needs ")[0]: reason for reason in by_memory}
    assert set(stages) <= set(row.stages)
    for stage in row.stages:
        asked = (tmp_path, made, "row", profile, [f"{stage}@a"])
        if stage not in stages:
            assert refuse_what_cannot_fit(*asked) == []
            continue
        with pytest.raises(LockstepError, match=f"row.yaml: {stage} needs about") as refused:
            refuse_what_cannot_fit(*asked)
        largest = stages[stage].rpartition(" for ")[2]
        assert f"({largest} " in str(refused.value)
    others = [reason for reason in stops.split("; ") if reason and reason not in by_memory]
    assert [reason for reason in others if "experts" not in reason] == []


def config_of(shape):
    """config.json of a dense decoder, or of experts in every layer that are as many weights."""
    config = {
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "vocab_size": shape.vocabulary,
        "dtype": "float32",
    }
    if shape.layer_weights > 2 * 4 * shape.width * shape.inner:
        attention = 2 * shape.width * (shape.q_width + shape.kv_width)
        experts = round((shape.layer_weights - attention) / (3 * shape.width * shape.inner))
        config |= {"num_local_experts": experts, "num_experts_per_tok": 1}
    return config


def test_experts_that_vllm_has_fused_are_refused(tmp_path):
    """The other reason that the page gives."""
    layer = torch.nn.Module()
    layer.experts = torch.nn.Module()
    layer.experts.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 3))
    runner = SimpleNamespace(get_model=lambda: layer)
    stored = {f"experts.{i}.{name}.weight": torch.zeros(2, 3) for i in (0, 1) for name in "gu"}
    save_file(stored, tmp_path / "model.safetensors")
    worker = Checked()
    worker.model_runner = runner
    assert "experts.w13_weight of vLLM cannot be checked" in worker.differs_from_files(tmp_path)


def test_a_faster_engine_makes_a_shorter_step(results):
    before = json.loads(scaling("--json", results=results).stdout)["plans"][0]
    better = json.loads(json.dumps(RESULTS["training.json"]))
    better["a"]["mfu"] = 0.6
    (results / "training.json").write_text(json.dumps(better), encoding="utf-8")
    after = json.loads(scaling("--json", results=results).stdout)["plans"][0]
    assert after["train_s"] < before["train_s"]


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_is_missing_is_named_with_the_script_that_makes_it(results, name):
    (results / name).unlink()
    done = scaling(results=results)
    assert done.returncode == 1
    assert name in done.stderr
    assert f"benchmarks/{Path(name).stem}.py" in done.stderr


def test_what_was_measured_without_a_gpu_does_not_count(results):
    on_a_cpu = json.loads(json.dumps(RESULTS["generation.json"]))
    on_a_cpu["b"]["hardware"] = "aarch64, 2 cores"
    (results / "generation.json").write_text(json.dumps(on_a_cpu), encoding="utf-8")
    assert "generation.json" in scaling(results=results).stderr


def test_a_page_that_is_not_what_results_say_is_noticed(results):
    assert scaling("--check", results=results).returncode == 1
    assert scaling("--write", results=results).returncode == 0
    assert scaling("--check", results=results).returncode == 0
    page = (results / "page.md").read_text(encoding="utf-8")
    assert page.startswith("# Scaling\n")
    assert page.endswith("The end.\n")
    (results / "page.md").write_text(page.replace("| 70B |", "| 71B |"), encoding="utf-8")
    assert scaling("--check", results=results).returncode == 1


def test_the_page_is_what_the_recorded_results_say():
    command = [sys.executable, ROOT / "benchmarks/scaling.py", "--check"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
