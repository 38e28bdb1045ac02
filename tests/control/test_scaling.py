"""The cost model of docs/scaling.md: it reads results, names missing ones, and makes the page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    "promises.json": {
        "checkpoints": {"135M": {"gigabytes": 1.5, "write_gb_per_s": 0.3, "read_s": 2.0}},
        "hashes": {"hash_s_per_gb_in_2_files": 1.4},
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
    where = ["--results", str(results), "--page", str(results / "page.md")] if results else []
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks/scaling.py", *where, *words],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


def test_the_fewest_nodes_hold_each_model_and_more_nodes_are_no_slower(results):
    said = json.loads(scaling("--json", results=results).stdout)
    by_model = {}
    for plan in said["plans"]:
        by_model.setdefault(plan["model"], []).append(plan)
    assert list(by_model) == ["7B", "70B", "400B MoE"]
    for plans in by_model.values():
        assert all(plan["gpu_gb"] <= 0.85 * 141 for plan in plans)
        assert [plan["nodes"] for plan in plans] == [plans[0]["nodes"] * n for n in (1, 2, 4)]
        assert plans[0]["generate_s"] >= plans[1]["generate_s"] >= plans[2]["generate_s"]
    fewest = [plans[0]["nodes"] for plans in by_model.values()]
    assert fewest == sorted(fewest)
    assert fewest[0] < fewest[-1]


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
    done = scaling("--check")
    assert done.returncode == 0, done.stderr
