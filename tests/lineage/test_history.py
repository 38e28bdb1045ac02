"""Questions about a real history: every way to name a thing, and what the answers say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.lineage.conftest import Asker
from tests.lineage.world import MODEL, Page, git


def newest(root: Path, stage: str, name: str = "record.json") -> dict[str, Any]:
    """A file of the newest entry of a stage."""
    records = root.glob(f".lockstep/jobs/{stage}/*/record.json")
    found = max(records, key=lambda path: path.stat().st_mtime)
    values: dict[str, Any] = json.loads(found.with_name(name).read_text())
    return values


def stage_of(answer: dict[str, Any], stage: str) -> dict[str, Any]:
    [found] = [node for node in answer["stages"] if node["stage"] == stage]
    return found


def test_an_artifact_is_found_by_every_name_it_has(ask: Asker) -> None:
    digest = newest(ask.root, "policy_update@iter_002")["outs"][MODEL]
    names = [
        "policy@iter_002",
        MODEL,
        f"{MODEL}/",
        f"./{MODEL}",
        str(ask.root / MODEL),
        f"{MODEL}/config.json",
        digest,
        digest.removesuffix(".dir"),
        digest[:6],
        digest[:12].upper(),
        "HEAD:policy@iter_002",
        f"faster:{MODEL}",
        f"kinder~1:{MODEL}/",
    ]
    for name in names:
        target = ask(name, "--json", "--depth", "0").json["target"]
        assert (target["path"], target["hash"]) == (MODEL, digest), name
    inside = ask("model/config.json", "--json", at=ask.root / MODEL / "..").json["target"]
    assert inside["hash"] == digest


def test_a_stage_is_found_by_its_address_and_by_its_run(ask: Asker) -> None:
    run = newest(ask.root, "score@iter_002", "tracking.json")["run_id"]
    by_run = ask(run, "--json").json
    by_address = ask("score@iter_002", "--json").json
    assert by_run["root"] == by_address["root"]
    assert stage_of(by_run, "score@iter_002")["job"]["mlflow_run"] == run
    for name in ("sft", "reward_model", "rollout@iter_001"):
        assert ask(name, "--json").json["target"]["stage"] == name


def test_a_revision_means_what_was_recorded_then(ask: Asker) -> None:
    then = ask("first:policy@iter_002", "--json").json
    now = ask("policy@iter_002", "--json").json
    assert then["target"]["hash"] != now["target"]["hash"]
    assert then["target"]["found_in"] == git(ask.root, "rev-parse", "first")
    assert now["target"]["found_in"] == "workspace"
    rates = [
        stage_of(answer, "policy_update@iter_002")["params"]["policy_update.learning_rate"]
        for answer in (then, now)
    ]
    assert rates == [2e-4, 1e-3]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("policy@iter_02", "policy@iter_002"),
        ("rolout@iter_001", "rollout@iter_001"),
        ("artifacts/policies", MODEL),
        ("deadbeef", "no artifact or MLflow run"),
        ("nowhere:sft", "no revision"),
        ("first~1:sft", "has no dvc.lock"),
        ("first:policy@iter_009", "policy@iter_002"),
    ],
)
def test_a_name_that_means_nothing_brings_up_what_is_near(ask: Asker, name: str, said: str) -> None:
    answer = ask(name)
    assert answer.status == 2
    assert answer.out == ""
    assert said in answer.err
    assert "Traceback" not in answer.err


def test_a_hash_that_means_two_things_lists_both(ask: Asker) -> None:
    # Both folders hold one empty file, so they have one hash.
    answer = ask(newest(ask.root, "prepare")["inputs"]["data"][:8])
    assert answer.status == 2
    assert "  data\n" in f"{answer.err}\n"
    assert "  models" in answer.err


def test_the_tree_tells_all_that_is_known_of_each_stage(ask: Asker) -> None:
    answer = ask("policy@iter_002", "--json").json
    assert sorted(node["stage"] or node["path"] for node in answer["stages"]) == [
        "data",
        "environments",
        "models",
        "policy_update@iter_001",
        "policy_update@iter_002",
        "prepare",
        "reward_model",
        "rewards",
        "rollout@iter_001",
        "rollout@iter_002",
        # The policy was made before the scores were made anew: its own scores are told.
        "score@iter_001",
        "score@iter_002",
        "sft",
        "tool_answers",
    ]
    update = stage_of(answer, "policy_update@iter_002")
    record = newest(ask.root, "policy_update@iter_002")
    assert record["outs"].items() <= update["outs"].items()
    assert update["inputs"] == record["inputs"]
    assert update["environment"] == record["environment"]
    # One version, in every clone and in the model card, and a name for the stage that ran it.
    version = update["code"]["version"]
    named = ask(version[:12])
    assert named.status == 2
    assert "2 stages have this code version" in named.err
    assert "policy_update@iter_002" in named.err
    assert stage_of(answer, "policy_update@iter_001")["code"]["version"] == version
    only = stage_of(answer, "sft")["code"]["version"]
    assert ask(only[:8], "--json").json["target"]["stage"] == "sft"
    assert update["code"]["commit"] == git(ask.root, "rev-parse", "first")
    assert update["code"]["uncommitted"] == ["params.yaml"]
    assert "stages/policy_update.py" in update["code"]["files"]
    assert [attempt["executor"] for attempt in update["job"]["attempts"]] == ["session"]
    assert update["job"]["mlflow_run"]
    score = stage_of(answer, "score@iter_002")
    assert score["outs"]["artifacts/scores/iter_002.parquet"] in update["inputs"].values()
    assert not score["in_workspace"]


def test_the_text_says_the_same(ask: Asker) -> None:
    text = ask("policy@iter_002").out
    for part in (
        "policy_update.learning_rate 0.001",
        "with uncommitted changes to params.yaml",
        "← rollout@iter_002",
        "← data (given)",
        "1 attempt",
        "torch 2",
        newest(ask.root, "sft", "tracking.json")["run_id"],
    ):
        assert part in text, part


def test_down_finds_what_was_made_at_any_time(ask: Asker) -> None:
    answer = ask("policy@sft", "--down", "--json").json
    updates = [node for node in answer["stages"] if node["stage"] == "policy_update@iter_002"]
    assert len(updates) == 2  # with the slow and with the fast learning rate
    assert not [node for node in answer["stages"] if node["stage"] == "reward_model"]
    near = ask("policy@sft", "--down", "--depth", "1", "--json").json
    assert "rollout@iter_002" not in {node["stage"] for node in near["stages"]}


def test_a_param_is_found_to_be_the_cause_of_another_policy(ask: Asker) -> None:
    answer = ask("diff", "first:policy@iter_002", "policy@iter_002", "--json")
    assert answer.status == 1
    [root] = answer.json["root_causes"]
    assert (root["cause"], root["key"]) == ("param", "policy_update.learning_rate")
    assert (root["old"], root["new"]) == (2e-4, 1e-3)
    assert root["stages"] == ["policy_update@iter_001", "policy_update@iter_002"]
    stages = [pair["new"] for pair in answer.json["pairs"]]
    assert stages.index("policy_update@iter_001") < stages.index("rollout@iter_002")
    text = ask("diff", "first:policy@iter_002", "policy@iter_002").out
    assert "policy_update.learning_rate 0.0002 → 0.001" in text
    assert text.index("Root causes") < text.index("Stage by stage")


def test_changed_code_is_named_with_the_commit_that_changed_it(ask: Asker) -> None:
    answer = ask("diff", "faster:scores@iter_002", "scores@iter_002")
    assert answer.status == 1
    assert "stages/score.py changed" in answer.out
    assert "kinder scores" in answer.out
    causes = ask("diff", "faster:score@iter_002", "score@iter_002", "--json").json["root_causes"]
    assert [(root["cause"], root["key"]) for root in causes] == [("code", "stages/score.py")]


def test_equal_artifacts_are_equal(ask: Asker) -> None:
    answer = ask("diff", "first:sft", "kinder:sft")
    assert answer.status == 0
    assert "They are equal" in answer.out
    assert ask("diff", "first:policy@sft", "policy@sft", "--json").json["equal"] is True
    assert ask("diff", "sft", "nothing").status == 2


def test_the_rows_of_a_policy_are_those_that_its_update_lists(ask: Asker) -> None:
    import pyarrow.parquet as pq

    answer = ask("policy@iter_002", "--rows", "--limit", "0", "--json").json
    listed = pq.read_table(ask.root / MODEL / "../experience.parquet").to_pylist()
    assert answer["total"] == len(listed) == 16
    for row, used in zip(answer["rows"], listed, strict=True):
        assert row["prompt_id"] == used["prompt_id"]
        assert row["advantages"] == used["advantages"]
        assert row["response"] is not None
        assert row["by_source"]
        assert row["seed"]
    one = answer["rows"][0]["prompt_id"]
    few = ask("policy@iter_002", "--rows", "--prompt", one, "--limit", "1").out
    assert "1 of 2 rows" in few
    assert "advantage mean" in few


def test_rows_that_differ_between_two_trainings_are_told(ask: Asker) -> None:
    words = ("diff", "--rows", "first:policy@iter_002", "policy@iter_002")
    answer = ask(*words, "--json")
    assert answer.status == 1
    assert answer.json["rows"]["changed"] > 0
    assert "Rows: " in ask(*words).out
    same = ask("diff", "--rows", "first:policy@sft", "policy@sft", "--json").json["rows"]
    assert same == {"only_in_old": 0, "only_in_new": 0, "changed": 0, "rows": []}


def test_a_prompt_is_followed_through_the_whole_history(ask: Asker) -> None:
    row = ask("rollouts@iter_001", "--rows", "--limit", "1", "--json").json["rows"][0]
    for name in (row["prompt_id"], row["prompt_id"][:8], row["prompt"]):
        answer = ask(f"prompt:{name}", "--json").json
        assert answer["prompt"] == row["prompt"]
        direct = [item["stage"] for item in answer["direct"]]
        assert direct.count("policy_update@iter_001") == 2  # both learning rates
    then = ask(f"first:prompt:{row['prompt_id']}", "--json").json
    assert [item["stage"] for item in then["direct"]].count("policy_update@iter_001") == 1
    demonstration = ask("sft", "--rows", "--limit", "1", "--json").json["rows"][0]["prompt_id"]
    answer = ask(f"prompt:{demonstration}", "--json").json
    assert "sft" in [item["stage"] for item in answer["direct"]]
    touched = {item["stage"] for item in answer["direct"] + answer["through_an_ancestor"]}
    assert touched >= {"policy_update@iter_001", "policy_update@iter_002"}
    assert "Through an ancestor" in ask(f"prompt:{demonstration}").out


@pytest.mark.parametrize(
    "words",
    [
        ("policy@iter_002",),
        ("policy@sft", "--down"),
        ("models",),
        ("diff", "first:policy@iter_002", "policy@iter_002", "--rows"),
        ("diff", "first:sft", "sft"),
        ("policy@iter_002", "--rows"),
        ("prompt:PROMPT",),
    ],
)
def test_a_page_stands_alone(ask: Asker, tmp_path: Path, words: tuple[str, ...]) -> None:
    row = ask("rollouts@iter_001", "--rows", "--limit", "1", "--json").json["rows"][0]
    words = tuple(word.replace("PROMPT", row["prompt_id"]) for word in words)
    file = tmp_path / "page.html"
    answer = ask(*words, "--format", "html", "--output", str(file))
    assert answer.out == ""
    assert "h1" in Page(file.read_text()).tags


def test_graphs_are_drawn_for_trees_and_comparisons(ask: Asker) -> None:
    for words in (("policy@iter_002",), ("diff", "first:policy@iter_002", "policy@iter_002")):
        drawn = ask(*words, "--format", "mermaid").out
        assert drawn.startswith("flowchart LR\n")
        assert "policy_update@iter_002" in drawn
        drawn = ask(*words, "--format", "dot").out
        assert drawn.startswith("digraph lineage {\n")
        assert len(re.findall(r" -> ", drawn)) >= 5
    refused = ask("policy@iter_002", "--rows", "--format", "dot")
    assert refused.status == 2
    assert "no graph" in refused.err
