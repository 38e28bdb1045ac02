"""What is left to say when files, ledger, dvc.lock or MLflow are gone or broken."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Clone
from tests.lineage.conftest import Asker
from tests.lineage.test_history import newest, stage_of
from tests.lineage.world import MODEL, git


@pytest.fixture
def fresh(history_root: Path, tmp_path: Path) -> Path:
    """A clone with git's files alone."""
    git(tmp_path, "clone", "-q", str(history_root), "fresh")
    return tmp_path / "fresh"


def entry_of(root: Path, stage: str) -> Path:
    return sorted(root.glob(f".lockstep/jobs/{stage}/*/record.json"))[-1].parent


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer without where it was found."""
    return {key: value for key, value in answer.items() if key not in ("target", "notes")}


def test_without_any_bytes_only_the_rows_are_gone(copy: Clone, ask_copy: Asker) -> None:
    before = ask_copy("policy@iter_002", "--json").json
    shutil.rmtree(copy.root / "artifacts")
    shutil.rmtree(copy.root / ".dvc" / "cache")
    assert told(ask_copy("policy@iter_002", "--json").json) == told(before)
    assert ask_copy("diff", "first:policy@iter_002", "policy@iter_002").status == 1
    answer = ask_copy("policy@iter_002", "--rows")
    assert answer.status == 2
    assert "is neither in the workspace nor in DVC's cache" in answer.err
    assert "`dvc pull artifacts/" in answer.err
    assert "`dvc repro " in answer.err
    assert ask_copy("prompt:0000").status == 2


def test_what_dvc_gc_took_is_named_with_the_way_back(copy: Clone, ask_copy: Asker) -> None:
    assert ask_copy("first:policy@iter_002", "--rows").status == 0
    copy.run("dvc", "gc", "--workspace", "--force")
    assert ask_copy("sft", "--rows").status == 0
    answer = ask_copy("first:policy@iter_002", "--rows")
    assert answer.status == 2
    first = git(copy.root, "rev-parse", "--short=7", "first")
    assert f"At commit {first}" in answer.err
    assert ask_copy("first:policy@iter_002").status == 0
    prompt = ask_copy("rollouts@iter_001", "--rows", "--json").json["rows"][0]["prompt_id"]
    gone = ask_copy(f"prompt:{prompt}", "--json").json["gone"]
    assert {item["stage"] for item in gone} >= {"policy_update@iter_002"}


def test_after_a_checkout_of_the_past_the_present_is_still_known(
    copy: Clone, ask_copy: Asker
) -> None:
    new = ask_copy("policy@iter_002", "--json").json["target"]["hash"]
    copy.run("git", "checkout", "-q", "first")
    here = ask_copy("policy@iter_002", "--json").json["target"]
    assert here["found_in"] == "workspace"
    assert here["hash"] != new
    later = ask_copy(new, "--json").json
    assert later["target"]["hash"] == new
    assert stage_of(later, "policy_update@iter_002")["job"]


def test_results_that_were_never_committed_are_known_by_the_ledger(
    copy: Clone, ask_copy: Asker
) -> None:
    new = newest(copy.root, "score@iter_002")["outs"]["artifacts/scores/iter_002.parquet"]
    copy.run("git", "reset", "-q", "--hard", "faster")
    copy.run("git", "tag", "-d", "kinder")
    copy.run("git", "reflog", "expire", "--expire=now", "--all")
    answer = ask_copy(new, "--json").json
    assert answer["target"]["found_in"] == "ledger"
    score = stage_of(answer, "score@iter_002")
    assert score["recorded_in"] == []
    assert "stages/score.py" in score["code"]["files"]  # from the copy of its map
    compared = ask_copy("diff", "scores@iter_002", new, "--json").json
    assert [root["key"] for root in compared["root_causes"]] == ["stages/score.py"]


def test_a_fresh_clone_answers_from_git_alone(fresh: Path, ask: Asker) -> None:
    before = ask("policy@iter_002", "--json").json
    after = ask("policy@iter_002", "--json", at=fresh).json
    assert {node["id"] for node in after["stages"]} == {node["id"] for node in before["stages"]}
    update = stage_of(after, "policy_update@iter_002")
    assert update["job"] is None
    assert update["code"]["commit"] == git(ask.root, "rev-parse", "faster")
    assert "no record in this clone" in ask("policy@iter_002", at=fresh).out
    assert ask("diff", "first:policy@iter_002", "policy@iter_002", at=fresh).status == 1
    assert "dvc pull" in ask("policy@iter_002", "--rows", at=fresh).err


def test_a_fresh_clone_learns_jobs_and_machines_from_mlflow(
    history_root: Path, fresh: Path, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = history_root / ".lockstep" / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    answer = ask("policy@iter_002", "--json", at=fresh)
    record = newest(history_root, "policy_update@iter_002")
    run = newest(history_root, "policy_update@iter_002", "tracking.json")["run_id"]
    update = stage_of(answer.json, "policy_update@iter_002")
    assert update["environment"] == record["environment"]
    assert update["job"]["mlflow_run"] == run
    assert update["job"]["attempts"][-1]["executor"] == "session"
    assert update["code"]["commit"] == git(history_root, "rev-parse", "first")
    silent = ask("policy@iter_002", "--json", "--no-mlflow", at=fresh).json
    assert stage_of(silent, "policy_update@iter_002")["job"] is None
    # What only MLflow knows is found by the run's id.
    git(fresh, "checkout", "-q", "--orphan", "empty")
    (fresh / "dvc.lock").unlink()
    for name in git(fresh, "for-each-ref", "--format=%(refname)").splitlines():
        git(fresh, "update-ref", "-d", name)
    alone = ask(run, "--json", at=fresh)
    assert alone.json["target"]["stage"] == "policy_update@iter_002"
    assert "no dvc.lock" in alone.err


def test_an_mlflow_that_does_not_answer_is_only_a_note(
    fresh: Path, ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    answer = ask("policy@iter_002", at=fresh)
    assert answer.status == 0
    assert "policy_update@iter_002" in answer.out
    assert answer.err.count("does not answer") == 1


def test_without_dvc_lock_the_ledger_and_the_history_answer(copy: Clone, ask_copy: Asker) -> None:
    before = ask_copy("policy@iter_002", "--json").json
    (copy.root / "dvc.lock").unlink()
    answer = ask_copy("policy@iter_002", "--json")
    assert answer.json["target"]["hash"] == before["target"]["hash"]
    assert "no dvc.lock" in answer.err
    (copy.root / "dvc.lock").write_text("stages: [")
    answer = ask_copy("policy@iter_002", "--json")
    assert answer.json["target"]["hash"] == before["target"]["hash"]
    assert "dvc.lock is skipped" in answer.err


@pytest.mark.parametrize("name", ["spec.json", "record.json", "entry.json", "tracking.json"])
@pytest.mark.parametrize("text", ["", '{"stage": "sf', "[]", '{"stage": 3}'])
def test_a_broken_entry_is_skipped_and_named(
    copy: Clone, ask_copy: Asker, name: str, text: str
) -> None:
    entry = entry_of(copy.root, "sft")
    (entry / name).write_text(text)
    answer = ask_copy("policy@sft", "--json")
    assert answer.status == 0
    assert stage_of(answer.json, "sft")["outs"]
    if text != '{"stage": 3}':
        assert f".lockstep/jobs/sft/{entry.name}" in answer.err


def test_an_entry_that_is_being_written_is_no_trouble(copy: Clone, ask_copy: Asker) -> None:
    folder = copy.root / ".lockstep" / "jobs" / "sft" / "0123456789ab-001"
    (folder / "attempts" / "001").mkdir(parents=True)
    spec = json.loads((entry_of(copy.root, "sft") / "spec.json").read_text())
    (folder / "spec.json").write_text(json.dumps(spec))
    answer = ask_copy("sft", "--json")
    assert answer.status == 0
    assert answer.err == ""


def forged(copy: Clone, **environment: Any) -> str:
    """A second job of sft with other bytes, on a machine that differs in what is given."""
    entry = entry_of(copy.root, "sft")
    other = entry.with_name(f"{entry.name[:-3]}009")
    shutil.copytree(entry, other)
    record = json.loads((other / "record.json").read_text())
    outs = {path: f"{index}" * 32 + ".dir" for index, path in enumerate(record["outs"], 1)}
    record |= {"outs": outs, "environment": {**record["environment"], **environment}}
    (other / "record.json").write_text(json.dumps(record))
    return outs["artifacts/policies/sft/model"]


def test_other_bytes_from_another_machine_are_explained(copy: Clone, ask_copy: Asker) -> None:
    other = forged(copy, threads="64", host="elsewhere")
    answer = ask_copy("diff", "policy@sft", other)
    assert answer.status == 1
    assert "the environment is the cause" in answer.out
    assert "threads 1 → 64" in answer.out
    assert "BROKEN" not in answer.out


def test_other_bytes_from_the_same_machine_are_a_broken_promise(
    copy: Clone, ask_copy: Asker
) -> None:
    other = forged(copy, host="elsewhere")
    answer = ask_copy("diff", "policy@sft", other)
    assert answer.status == 1
    assert "BROKEN PROMISE" in answer.out
    assert ask_copy("diff", "policy@sft", other, "--json").json["broken_promise"] is True
    assert "BROKEN PROMISE" in ask_copy("diff", "policy@sft", other, "--format", "html").out


def test_the_results_of_a_dvc_experiment_are_found_by_its_name(
    copy: Clone, ask_copy: Asker
) -> None:
    new = newest(copy.root, "score@iter_002")["outs"]["artifacts/scores/iter_002.parquet"]
    copy.run("git", "update-ref", "refs/exps/12/3456/brave-owl", "kinder")
    copy.run("git", "checkout", "-q", "--detach", "first")
    copy.run("git", "branch", "-qD", "main")
    copy.run("git", "tag", "-d", "kinder", "faster")
    shutil.rmtree(copy.root / ".lockstep")
    assert ask_copy("brave-owl:scores@iter_002", "--json").json["target"]["hash"] == new
    assert ask_copy(new[:10], "--json").json["target"]["hash"] == new


def test_an_artifact_that_was_changed_by_hand_is_noted(copy: Clone, ask_copy: Asker) -> None:
    config = copy.root / MODEL / "config.json"
    text = config.read_text()
    config.unlink()
    config.write_text(text + " ")
    answer = ask_copy("policy@iter_002")
    assert answer.status == 0
    assert "is not what dvc.lock records" in answer.err
