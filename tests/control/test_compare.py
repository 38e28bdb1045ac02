"""`lockstep compare` puts policies of any revision side by side, and says what it cannot show."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipelines.commands.cli import main
from stages.evaluation.answers import Answered
from tests.control.recorded_policies import Recorded, folder_of
from tests.evaluation.cases import POLICY, REFERENCE, RIGHT, answer, answered, votes
from tests.lineage.world import Page

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"
BETTER = [
    *POLICY[:3],
    answered("d", answer(3.0, RIGHT, text=HOSTILE), *votes((1.0, RIGHT, "4")), task="words"),
    *POLICY[4:],
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """`first`: sft and iter_001. `bold`, an experiment. Then a larger step, and iter_002."""
    clone = Recorded(tmp_path_factory.mktemp("compare") / "clone")
    clone.params(0.1, "iter_001")
    clone.policy("sft", REFERENCE, kl_to_reference=0.0, reward_mean=0.5)
    numbers = {"kl_to_reference": 0.02, "reward_mean": 0.8, "reward_mean_error": 0.04}
    clone.policy("iter_001", POLICY, REFERENCE, **numbers)
    clone.record("first", "first")
    clone.params(0.3, "iter_001")
    clone.policy("iter_001", REFERENCE, REFERENCE, kl_to_reference=0.5, reward_mean=0.4)
    bold = clone.record("an experiment")
    clone.git("reset", "-q", "--hard", "HEAD~1")
    clone.git("update-ref", "refs/exps/ab/cdef/bold-dove", bold)
    clone.params(0.2, "iter_001", "iter_002")
    clone.policy("iter_001", POLICY, REFERENCE, **numbers)
    clone.policy("iter_002", BETTER, REFERENCE, kl_to_reference=0.04, reward_mean=1.0)
    clone.record("two iterations")
    return clone


@pytest.fixture(autouse=True)
def clone(made: Recorded, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.chdir(made.root)
    monkeypatch.setenv("COLUMNS", "100")
    return made


def ask(capsys, *words: str) -> dict:
    capsys.readouterr()
    assert main(["compare", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words: str) -> str:
    capsys.readouterr()
    assert main(["compare", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "policy", "path"),
    [
        ("iter_001", "iter_001", ["sft", "iter_001"]),
        ("workspace", "iter_002", ["sft", "iter_001", "iter_002"]),
        ("first", "iter_001", ["sft", "iter_001"]),
        ("first:", "iter_001", ["sft", "iter_001"]),
        ("first:sft", "sft", ["sft"]),
        ("HEAD~1", "iter_001", ["sft", "iter_001"]),
        ("bold-dove", "iter_001", ["sft", "iter_001"]),
    ],
)
def test_a_side_is_a_policy_of_any_revision(clone, capsys, name, policy, path):
    side = ask(capsys, "sft", name)["sides"][1]
    assert (side["name"], side["policy"], side["path"]) == (name, policy, path)
    commit = {"iter_001": "workspace", "workspace": "workspace"}.get(name)
    assert side["revision"] == (commit or clone.git("rev-parse", revision(name)))


def revision(name: str) -> str:
    return "refs/exps/ab/cdef/bold-dove" if name == "bold-dove" else name.partition(":")[0]


def test_params_that_differ_are_those_that_were_recorded(capsys):
    found = ask(capsys, "first", "bold-dove", "iter_002", "sft")["params"]
    # sft of the workspace was recorded beside iter_002, so it does not differ from it.
    assert found == [{"key": "policy_update.learning_rate", "values": [0.1, 0.3, 0.2, 0.2]}]
    assert ask(capsys, "sft", "iter_002")["params"] == []


def test_metrics_come_with_what_was_recorded_of_their_precision(capsys):
    rows = {row["name"]: row["values"] for row in ask(capsys, "first", "bold-dove")["metrics"]}
    assert rows["reward_mean"] == [
        {"value": 0.8, "low": None, "high": None, "error": 0.04},
        {"value": 0.4, "low": None, "high": None, "error": None},
    ]
    # Three of five prompts that can be judged.
    accuracy, other = rows["accuracy"]
    assert accuracy["value"] == other["value"] == 0.6
    assert accuracy["low"] < 0.6 < accuracy["high"]
    assert not [name for name in rows if name.endswith(("_low", "_high", "_error"))]


def test_curves_follow_the_policies_each_side_was_trained_through(capsys):
    curves = {c["name"]: c["lines"] for c in ask(capsys, "bold-dove", "iter_002")["curves"]}
    values = [
        [(p["step"], p["policy"], p["at"]["value"]) for p in line]
        for line in curves["kl_to_reference"]
    ]
    assert values == [
        [(0, "sft", 0.0), (1, "iter_001", 0.5)],
        [(0, "sft", 0.0), (1, "iter_001", 0.02), (2, "iter_002", 0.04)],
    ]


def test_a_pair_is_compared_prompt_by_prompt(capsys):
    [pair] = ask(capsys, "sft", "iter_001", "-n", "0")["pairs"]
    assert (pair["old"], pair["new"], pair["num_prompts"]) == (0, 1, 6)
    counts = {name: number for name, number in pair["counts"].items() if number}
    assert counts == {
        "improved": 1,
        "regressed": 1,
        "still wrong": 1,
        "still right": 2,
        "higher reward": 1,
    }
    assert pair["outcome"] == "unclear"
    assert pair["numbers"]["win_rate"] == pytest.approx(4 / 6)
    assert pair["numbers"]["accuracy_gain"] == 0
    # Two of five prompts changed, in different directions: paired, not the sum of two errors.
    assert pair["numbers"]["accuracy_gain_error"] == pytest.approx((2 * 5 / 4) ** 0.5 / 5)
    assert [(s["prompt_id"], s["outcome"]) for s in pair["changed"]] == [
        ("c", "improved"),
        ("d", "regressed"),
    ]
    assert pair["changed"][0]["old"]["correct"] is False
    assert pair["changed"][0]["new"]["response"] == "rewarded 1.0, 20 long"


def test_the_order_of_the_sides_is_the_direction_of_the_change(capsys):
    [pair] = ask(capsys, "iter_001", "sft", "-n", "0")["pairs"]
    assert [(s["prompt_id"], s["outcome"]) for s in pair["changed"]] == [
        ("d", "improved"),
        ("c", "regressed"),
    ]
    assert pair["numbers"]["win_rate"] == pytest.approx(2 / 6)


def test_every_two_of_several_sides_are_compared(capsys):
    pairs = ask(capsys, "sft", "first", "iter_002")["pairs"]
    assert [(pair["old"], pair["new"]) for pair in pairs] == [(0, 1), (0, 2), (1, 2)]
    assert pairs[2]["counts"]["improved"] == 1  # d


def test_where_nothing_is_judged_samples_change_sides_by_reward(tmp_path, capsys, monkeypatch):
    clone = Recorded(tmp_path / "clone")
    clone.params(0.1, "iter_001")
    unjudged = [
        [
            answered(name, answer(reward), answer(reward), expected=None)
            for name, reward in rewards.items()
        ]
        for rewards in ({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 4.0, "b": 1.0, "c": 3.0})
    ]
    clone.policy("sft", unjudged[0], reward_mean=2.0)
    clone.policy("iter_001", unjudged[1], unjudged[0], reward_mean=2.7)
    clone.record("unjudged")
    monkeypatch.chdir(clone.root)
    [pair] = ask(capsys, "sft", "iter_001")["pairs"]
    assert [(s["prompt_id"], s["outcome"]) for s in pair["changed"]] == [
        ("a", "higher reward"),
        ("b", "lower reward"),
    ]
    assert "accuracy_gain" not in pair["numbers"]


def test_prompts_of_one_side_alone_are_left_out_and_said(tmp_path, capsys, monkeypatch):
    clone = Recorded(tmp_path / "clone")
    clone.params(0.1, "iter_001")
    clone.policy("sft", REFERENCE[:4], reward_mean=0.5)
    clone.policy("iter_001", POLICY[1:], reward_mean=0.6)
    clone.record("other prompts")
    monkeypatch.chdir(clone.root)
    found = ask(capsys, "sft", "iter_001")
    [pair] = found["pairs"]
    assert (pair["num_prompts"], pair["only_in_old"], pair["only_in_new"]) == (3, 1, 2)
    assert pair["numbers"]["win_rate"] == pytest.approx(1.5 / 3)  # b lost, c tied, d won
    assert "evaluated on different prompts: 3 are the same" in found["notes"][-1]


def test_answers_that_are_gone_leave_the_numbers(clone, tmp_path, capsys, monkeypatch):
    root = tmp_path / "clone"
    shutil.copytree(clone.root, root, symlinks=True)
    shutil.rmtree(root / ".dvc/cache")
    shutil.rmtree(root / folder_of("iter_002"))
    monkeypatch.chdir(root)
    found = ask(capsys, "sft", "iter_002")
    assert found["pairs"] == []
    assert next(row for row in found["metrics"] if row["name"] == "accuracy")["values"][1]
    assert "the answers of iter_002 are not compared" in found["notes"][-1]
    assert "dvc pull artifacts/evaluations/iter_002" in found["notes"][-1]


def test_numbers_are_those_that_dvc_recorded_and_not_an_edited_file(
    clone, tmp_path, capsys, monkeypatch
):
    root = tmp_path / "clone"
    shutil.copytree(clone.root, root, symlinks=True)
    (root / "metrics/evaluations/iter_002.json").write_text('{"kl_to_reference": 99.0}')
    monkeypatch.chdir(root)
    rows = {row["name"]: row["values"] for row in ask(capsys, "sft", "iter_002")["metrics"]}
    assert rows["kl_to_reference"][1]["value"] == 0.04  # the commit still has the recorded file


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sft"], "name at least two to compare"),
        (["sftt", "iter_001"], "did you mean 'sft'?"),
        (["sft", "nothing:iter_001"], "git knows no revision or DVC experiment 'nothing'"),
        (["sft", "first:iter_002"], "there are iter_001, sft"),
        (["iter_002", "workspace"], "are the same policy of workspace"),
        (["sft"] * 7, "at most 6 can be compared at once"),
        (["sft", "first", "-n", "-1"], "--limit is a number from 0 up"),
        (["sft", "first", "--json", "--html", "x"], "choose one"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_what_there_is(capsys, words, expected):
    assert expected in refused(capsys, *words)


def test_the_terminal_shows_each_part_and_no_control_characters(capsys):
    assert main(["compare", "first", "iter_002"]) == 0
    text = capsys.readouterr().out
    assert "policy_update.learning_rate  0.1    0.2" in text
    assert "iter_002 against first" in text
    assert "improved: prompt d" in text
    assert "▁" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_the_page_is_one_file_that_runs_and_fetches_nothing(tmp_path):
    path = tmp_path / "review.html"
    assert main(["compare", "first", "iter_002", "bold-dove", "-n", "0", "--html", str(path)]) == 0
    text = path.read_text()
    page = Page(text)
    assert "policy_update.learning_rate" in page.text
    assert "iter_002 against first" in page.text
    assert "<script>alert(1)</script>" in page.text  # as text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "prefers-color-scheme: dark" in text
    assert "default-src 'none'" in text
    assert "svg" in page.tags


def test_nothing_is_written_into_the_clone(clone, capsys):
    before = snapshot(clone.root)
    ask(capsys, "first", "iter_002")
    assert snapshot(clone.root) == before


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in root.rglob("*")
        if path.is_file() and ".lockstep" not in path.parts
    }


SCORED = """\
    deps:
      - artifacts/policies/sft/model
      - artifacts/rewards/reward_model
      - artifacts/rewards/verifier
    params: [rl.reward, evaluate]
    outs: [artifacts/evaluations/sft]
"""


def record_scored(
    clone: Recorded, tag: str, reward: str, correct: str, answers: Sequence[Answered]
) -> None:
    """The policy sft, evaluated with these sources."""
    clone.params(0.1, "iter_001")
    values = json.loads((clone.root / "params.yaml").read_text())
    values["rl"]["reward"], values["evaluate"] = reward, {"correct": correct}
    (clone.root / "params.yaml").write_text(json.dumps(values))
    for name in ("verifier", "reward_model"):
        source = clone.root / "artifacts/rewards" / name
        source.mkdir(parents=True, exist_ok=True)
        (source / "weights").write_text(name)
    clone.policy("sft", answers)
    clone.policy("iter_001", REFERENCE, REFERENCE)
    clone.record(tag, tag)


def test_rewards_and_judgements_of_different_sources_are_not_compared(
    tmp_path: Path, monkeypatch, capsys
):
    clone = Recorded(tmp_path / "clone")
    monkeypatch.chdir(clone.root)
    graph = (clone.root / "dvc.yaml").read_text()
    plain = "    deps: [artifacts/policies/sft/model]\n    outs: [artifacts/evaluations/sft]\n"
    assert plain in graph
    (clone.root / "dvc.yaml").write_text(graph.replace(plain, SCORED))
    record_scored(clone, "model", "reward_model", "verifier", POLICY)
    record_scored(clone, "again", "reward_model", "verifier", REFERENCE)
    record_scored(clone, "verified", "verifier", "verifier", REFERENCE)
    record_scored(clone, "neither", "verifier", "reward_model", POLICY)
    shown = ask(capsys, "model:sft", "again:sft")
    assert {"win_rate", "accuracy_gain"} <= set(shown["pairs"][0]["numbers"])
    assert not any("differ" in note for note in shown["notes"])
    shown = ask(capsys, "model:sft", "verified:sft")
    [pair] = shown["pairs"]
    assert set(pair["numbers"]) == {"accuracy_gain", "accuracy_gain_error"}
    assert set(pair["counts"]) <= {"improved", "regressed", "still right", "still wrong"}
    assert "rewarded by different sources" in shown["notes"][0]
    shown = ask(capsys, "verified:sft", "neither:sft")
    [pair] = shown["pairs"]
    assert "win_rate" in pair["numbers"]
    assert "accuracy_gain" not in pair["numbers"]
    assert "what is right was judged differently" in shown["notes"][0]
    shown = ask(capsys, "model:sft", "neither:sft")
    [pair] = shown["pairs"]
    assert (pair["outcome"], pair["numbers"], pair["changed"]) == (None, {}, [])
    assert main(["compare", "model:sft", "neither:sft"]) == 0
    assert "neither:sft against model:sft: not compared, over" in capsys.readouterr().out
