"""`lockstep samples` shows the answers that were asked for, and says what it cannot show."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.commands.cli import main
from stages.evaluation import folder, tasks
from stages.evaluation.contest import contest
from tests.evaluation.cases import POLICY, REFERENCE, answer, answered

PARAMS = """\
rl:
  iterations:
    iter_001: {policy: sft}
    iter_002: {policy: iter_001}
"""


@pytest.fixture(autouse=True)
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with the evaluations of sft and of its last policy, and none between them."""
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "params.yaml").write_text(PARAMS)
    put(tmp_path, "sft", REFERENCE)
    put(tmp_path, "iter_002", POLICY, REFERENCE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(root, policy, answers, reference=None):
    path = root / "artifacts/evaluations" / policy
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    compared = contest(answers, reference) if reference else None
    folder.write(path, answers, compared, tasks.breakdown(answers, compared))


def ask(capsys, *words: str) -> dict:
    assert main(["samples", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def names(found: dict) -> list[str]:
    return [row["prompt_id"] for row in found["samples"]]


def refused(capsys, *words: str) -> str:
    assert main(["samples", *words]) == 2
    return capsys.readouterr().err


def test_the_last_policy_is_shown_beside_sft(capsys):
    found = ask(capsys)
    assert (found["policy"], found["against"]) == ("iter_002", "sft")
    assert names(found) == list("abcdef")
    assert found["samples"][0] == {
        "prompt_id": "a",
        "prompt": "prompt a",
        "answer": "4",
        "task": "sums",
        "response": "rewarded 2.0, 10 long",
        "finish_reason": "stop",
        "length": 10,
        "reward": 2.0,
        "correct": True,
        "pass_rate": pytest.approx(1 / 3),
        "reference_response": "rewarded 1.0, 8 long",
        "reference_reward": 1.0,
        "won": 1.0,
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--wrong"], "bd"),
        (["--right"], "acf"),
        (["--lost"], "b"),
        (["--won"], "aed"),  # by 1, 1 and 0.5; a and e in the order of the file
        (["--task", "sums"], "abc"),
        (["--wrong", "--task", "words"], "d"),
        (["-n", "2"], "ab"),
        (["--limit", "0"], "abcdef"),
    ],
)
def test_what_is_asked_for_is_shown(capsys, words, expected):
    assert names(ask(capsys, *words)) == list(expected)


def test_the_limit_hides_nothing_from_the_count(capsys):
    found = ask(capsys, "--right", "-n", "1")
    assert (found["num_prompts"], found["num_chosen"]) == (6, 3)
    assert main(["samples", "--right", "-n", "1"]) == 0
    out = capsys.readouterr().out
    assert "iter_002: 1 of 3 prompts (right), of 6 in all; by reward it wins 66.7%" in out
    assert "2 more: -n N, or -n 0 for all" in out


def test_sampled_responses_come_when_asked_for(capsys):
    assert "sampled" not in ask(capsys)["samples"][0]
    sampled = ask(capsys, "--sampled")["samples"][0]["sampled"]
    assert [(one["vote"], one["correct"]) for one in sampled] == [
        ("4", True),
        ("5", False),
        ("5", False),
    ]
    assert main(["samples", "--sampled", "-n", "1"]) == 0
    assert "sample 2" in capsys.readouterr().out


def test_the_text_has_prompt_answers_and_rewards(capsys):
    assert main(["samples", "--lost"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "",
        "b  [sums]",
        "  prompt    prompt b",
        "  expected  4",
        "  iter_002  rewarded 0.0, 8 long",
        "            (wrong, reward 0, 8 tokens, 33% of samples right)",
        "  sft       rewarded 0.5, 8 long",
        "            (wrong, reward 0.5, 8 tokens, 0% of samples right)",
    ]


def test_sft_is_shown_alone_or_against_another(capsys):
    found = ask(capsys, "sft")
    assert found["against"] is None
    assert found["samples"][0]["won"] is None
    assert names(ask(capsys, "sft", "--against", "iter_002", "--won")) == ["b"]


def test_control_characters_do_not_reach_the_terminal(clone, capsys):
    odd = [answered("a", answer(1.0, text="\x1b[2Jgone\nsecond"), answer(1.0))]
    (clone / "params.yaml").write_text("rl: {iterations: {other: {policy: sft}}}\n")
    put(clone, "other", odd)
    assert main(["samples", "other", "--against", "sft"]) == 2
    assert "evaluated on different prompts" in capsys.readouterr().err
    put(clone, "sft", odd)
    assert main(["samples", "sft"]) == 0
    out = capsys.readouterr().out
    assert "␛[2Jgone\n" in out
    assert "\x1b" not in out


def test_what_cannot_be_shown_is_explained(capsys):
    assert "no policy 'iter_009'; there are sft, iter_001, iter_002" in refused(capsys, "iter_009")
    missing = refused(capsys, "iter_001")
    assert "evaluations/iter_001/samples.parquet does not exist: `lockstep run`" in missing
    assert "no task 'maths'; there are sums, words" in refused(capsys, "--task", "maths")
    assert "compared with itself" in refused(capsys, "sft", "--lost")
    assert "compared with itself" in refused(capsys, "sft", "--against", "sft")
    assert "0 for all" in refused(capsys, "-n", "-1")


def test_right_and_wrong_need_answers(clone, capsys):
    plain = [answered("a", answer(1.0), answer(1.0), expected=None)]
    (clone / "params.yaml").write_text("rl: {iterations: {other: {policy: sft}}}\n")
    put(clone, "sft", plain)
    assert "the data have no expected answers" in refused(capsys, "sft", "--wrong")
    assert "no prompt has a task" in refused(capsys, "sft", "--task", "x")


def test_a_damaged_file_is_named(clone, capsys):
    (clone / "artifacts/evaluations/sft/samples.parquet").write_bytes(b"torn")
    assert "evaluations/sft cannot be read as an evaluation" in refused(capsys, "sft")


def test_the_parser_reads_no_tables():
    program = (
        "import sys, pipelines.commands.cli; assert not {'pyarrow', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
