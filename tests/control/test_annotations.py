"""People's preferences: kept line by line, asked about fairly, measured, written for prepare."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from pipelines.annotations import agreement, queue, store
from pipelines.annotations.draw import Strategy, draw
from pipelines.annotations.judgement import Choice, Judgement, Origin, Response
from pipelines.annotations.pair import Pair, identified
from pipelines.base.errors import LockstepError
from pipelines.commands.cli import main
from stages.data.artifacts import write_parquet
from stages.data.schema import RolloutRow, ScoreRow
from stages.data.seeds import content_id
from tests.waiting import TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
ONE = Response(text="4", policy="sft", policy_hash="aa.dir", seed=3, sampling={"temperature": 1.0})
OTHER = Response(text="5", policy="iter_001", policy_hash="bb.dir", seed=4)
ASKED = ({"role": "user", "content": "2+2="},)


def judgement(**changes: Any) -> Judgement:
    said = Judgement(
        messages=ASKED,
        left=ONE,
        right=OTHER,
        chosen=Choice.LEFT,
        annotator="ann",
        origin=Origin(place="chat"),
    )
    return replace(said, **changes)


def pair(number: int = 0, **changes: Any) -> Pair:
    rewards = changes.pop("rewards", ({}, {}))
    sides = [
        replace(side, text=f"{side.text} ({number})", rewards=of)
        for side, of in zip((ONE, OTHER), rewards, strict=True)
    ]
    origin = Origin(place="queue", iteration="iter_001", prompt_id=f"prompt {number % 3}")
    return identified(
        replace(Pair(messages=ASKED, one=sides[0], other=sides[1], origin=origin), **changes)
    )


# ---- what is kept


def test_a_judgement_is_read_back_as_it_was_made_and_withdrawing_rewrites_nothing(tmp_path):
    kept = store.append(tmp_path, judgement(annotator="Ann Lee", note="both are short"))
    assert kept.annotator == "ann-lee"
    assert store.append(tmp_path, kept) == kept, "sent twice, kept once"
    assert store.read(tmp_path).judgements == (kept,)
    path = tmp_path / "annotations/judgements/ann-lee.jsonl"
    before = path.read_bytes()
    store.withdraw(tmp_path, "ann lee", kept.id)
    found = store.read(tmp_path)
    assert (found.judgements, found.num_withdrawn) == ((), 1)
    assert path.read_bytes().startswith(before)
    with pytest.raises(LockstepError, match=r"ann-lee\.jsonl has no judgement .* that stands"):
        store.withdraw(tmp_path, "ann lee", kept.id)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"annotator": "../ann"}, "a name begins with a letter or a digit"),
        ({"annotator": "a/b"}, "letters, digits, spaces and"),
        ({"right": replace(ONE, seed=9)}, "the same text"),
        ({"messages": ()}, "needs messages that end with what the two responses answer"),
        ({"note": "\ud800"}, "half a character"),
        ({"left": replace(ONE, rewards={"reward": float("nan")})}, "cannot be written as JSON"),
        ({"left": replace(ONE, seed="three")}, r"left\.seed"),
    ],
)
def test_what_is_no_judgement_is_refused_and_leaves_no_line(tmp_path, changes, message):
    with pytest.raises(LockstepError, match=message):
        store.append(tmp_path, judgement(**changes))
    assert not [*tmp_path.rglob("*.jsonl")]


@pytest.mark.parametrize("cut", [b'{"kind": "judg', b'{"note": "\xc3', b"\0\0\0"])
def test_a_line_that_a_kill_cut_off_is_named_and_kept(tmp_path, cut):
    first = store.append(tmp_path, judgement())
    path = tmp_path / "annotations/judgements/ann.jsonl"
    with path.open("ab") as file:
        file.write(cut)
    # A second writer may die while it puts the file in order.
    for more in (b"", b"\n", b'\n{"kind": "to'):
        with path.open("ab") as file:
            file.write(more)
        assert f"{path} line 2 was cut off" in store.read(tmp_path).notes[0]
    second = store.append(tmp_path, judgement(chosen=Choice.TIE))
    third = store.append(tmp_path, judgement(chosen=Choice.RIGHT))
    found = store.read(tmp_path)
    assert found.judgements == (first, second, third)
    assert "line 2 was cut off" in found.notes[0]
    assert cut in path.read_bytes()


def test_a_whole_line_that_lacks_only_its_end_counts(tmp_path):
    first = store.append(tmp_path, judgement())
    path = tmp_path / "annotations/judgements/ann.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    second = store.append(tmp_path, judgement(chosen=Choice.TIE))
    found = store.read(tmp_path)
    assert (found.judgements, found.notes) == ((first, second), ())


def test_any_other_damage_is_an_error_that_names_the_line(tmp_path):
    for chosen in (Choice.LEFT, Choice.TIE):
        store.append(tmp_path, judgement(chosen=chosen))
    path = tmp_path / "annotations/judgements/ann.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["<<<<<<< HEAD", *lines, ""]))
    with pytest.raises(LockstepError, match=r"ann\.jsonl line 1 cannot be read \(it is not JSON\)"):
        store.read(tmp_path)
    path.write_text("\n".join([lines[0], lines[1].replace("tie", "maybe"), ""]))
    with pytest.raises(LockstepError, match=r"line 2 cannot be read \(chosen: .*'left', 'right'"):
        store.read(tmp_path)
    path.write_text(f"{lines[0]}\n")
    path.rename(path.with_name("bo.jsonl"))
    with pytest.raises(LockstepError, match=r"bo\.jsonl line 1 is of 'ann'"):
        store.read(tmp_path)


AT_ONCE = """
import sys, time
from pathlib import Path
from pipelines.annotations import queue, store
from pipelines.annotations.judgement import Choice
root, mine = Path(sys.argv[1]), sys.argv[2]
(root / mine).touch()
while len([*root.glob("ready*")]) < 2:
    time.sleep(0.001)
for pair_id in queue.read_queue(root):
    try:
        queue.judge(root, "ann", pair_id, Choice.LEFT, note=mine)
    except store.AlreadyJudged:
        pass
"""


def test_two_processes_at_once_keep_every_line_and_judge_no_pair_twice(tmp_path):
    pairs = [pair(number) for number in range(60)]
    queue.extend(tmp_path, pairs, 1)
    started = [
        subprocess.Popen([sys.executable, "-c", AT_ONCE, str(tmp_path), name], cwd=ROOT)
        for name in ("ready_one", "ready_two")
    ]
    assert [each.wait(TIMEOUT_S) for each in started] == [0, 0]
    found = store.read(tmp_path)
    assert sorted(said.origin.pair for said in found.judgements) == sorted(p.id for p in pairs)
    assert not found.notes


# ---- what is asked


def test_a_pair_goes_to_as_many_people_as_it_asks_for_and_to_each_once(tmp_path):
    queue.extend(tmp_path, [pair(0), pair(1)], 2)
    first, progress = queue.next_pair(tmp_path, "ann")
    assert (progress.num_judged, progress.num_left, progress.num_pairs) == (0, 2, 2)
    queue.judge(tmp_path, "ann", first.id, Choice.LEFT)
    with pytest.raises(store.AlreadyJudged, match="ann has judged pair"):
        queue.judge(tmp_path, "Ann", first.id, Choice.RIGHT)
    assert queue.next_pair(tmp_path, "bo")[0] == first, "what is begun comes first"
    queue.judge(tmp_path, "bo", first.id, Choice.SKIP)
    assert queue.next_pair(tmp_path, "bo")[0] != first, "a skip is not asked again"
    assert queue.next_pair(tmp_path, "cy")[0] == first, "and leaves the pair to others"
    said = queue.judge(tmp_path, "cy", first.id, Choice.TIE)
    assert queue.next_pair(tmp_path, "di")[0] != first, "two have an opinion of it"
    store.withdraw(tmp_path, "cy", said.id)
    assert queue.next_pair(tmp_path, "cy")[0] == first
    with pytest.raises(LockstepError, match=r"queue\.jsonl has no pair 'none'"):
        queue.judge(tmp_path, "ann", "none", Choice.LEFT)


def test_sides_carry_no_information_and_stay_where_they_are():
    pairs = [pair(number) for number in range(400)]
    left = [each.sides("ann")[0].policy for each in pairs]
    assert 150 < left.count("sft") < 250
    assert left == [each.sides("ann")[0].policy for each in pairs]
    turned = [replace(each, one=each.other, other=each.one) for each in pairs]
    assert [identified(each).id for each in turned] == [each.id for each in pairs]
    assert left != [each.sides("bo")[0].policy for each in pairs]
    said = pairs[0].judged("ann", Choice.LEFT)
    assert (said.left, said.right) == pairs[0].sides("ann")
    assert said.preferred == said.left


def test_the_queue_grows_by_what_it_lacks(tmp_path):
    pairs = [pair(number) for number in range(6)]
    added = queue.extend(tmp_path, pairs[:4], 1)
    assert (added.num_added, added.num_there, added.num_raised) == (4, 0, 0)
    added = queue.extend(tmp_path, pairs, 1)
    assert (added.num_added, added.num_there, added.num_raised) == (2, 4, 0)
    added = queue.extend(tmp_path, pairs[:1], 3)
    assert (added.num_added, added.num_there, added.num_raised) == (0, 0, 1)
    assert [each.num_annotators for each in queue.read_queue(tmp_path).values()] == [3, *[1] * 5]


def test_strategies_draw_what_they_say_and_a_larger_draw_begins_with_the_smaller():
    def scored(number, gap, judge_gap):
        return pair(number, rewards=({"reward": gap, "rm": gap, "judge": judge_gap}, nought))

    nought = {"reward": 0.0, "rm": 0.0, "judge": 0.0}
    # Prompts 0, 1, 2, 0, 1, 2: three prompts with two pairs each.
    gaps = [(3.0, 1.0), (0.1, -0.1), (-2.0, 2.0), (0.2, 0.2), (-1.0, 1.0), (1.5, 0.5)]
    pairs = [scored(number, *gap) for number, gap in enumerate(gaps)]
    close = draw(pairs, Strategy.CLOSE, 1, 6)
    assert [pairs.index(each) for each in close] == [1, 3, 5, 4, 2, 0]
    disagreeing = draw(pairs, Strategy.DISAGREEMENT, 1, 6)
    assert [pairs.index(each) for each in disagreeing] == [2, 4, 1]
    drawn = draw(pairs, Strategy.RANDOM, 1, 6)
    assert draw(pairs[::-1], Strategy.RANDOM, 1, 4) == drawn[:4]
    assert draw(pairs, Strategy.RANDOM, 2, 6) != drawn
    for three in (close[:3], drawn[:3]):
        assert len({each.origin.prompt_id for each in three}) == 3, "one of each prompt first"
    with pytest.raises(LockstepError, match="with one source"):
        draw([pair(0, rewards=({"reward": 1.0, "rm": 1.0},) * 2)], Strategy.DISAGREEMENT, 1, 6)
    with pytest.raises(LockstepError, match="no pair has rewards"):
        draw([pair()], Strategy.CLOSE, 1, 6)


# ---- what people agree on


def test_cohens_kappa_by_hand():
    both = [("yes", "yes")] * 20 + [("yes", "no")] * 5 + [("no", "yes")] * 10 + [("no", "no")] * 15
    ratings = {str(i): {"ann": a, "bo": b} for i, (a, b) in enumerate(both)}
    found = agreement.cohen({**ratings, "alone": {"ann": "no"}}, "ann", "bo")
    # Observed 35/50; by chance 25/50 * 30/50 + 25/50 * 20/50 = 0.5; (0.7 - 0.5) / (1 - 0.5).
    assert (found.num_pairs, found.observed) == (50, 0.7)
    assert found.kappa == pytest.approx(0.4)
    same = {str(i): {"ann": "yes", "bo": "yes"} for i in range(3)}
    assert agreement.cohen(same, "ann", "bo").kappa is None
    assert agreement.cohen(ratings, "ann", "cy") is None


def test_fleiss_kappa_by_hand():
    # Three pairs: three agree, two of three agree, two of two differ.
    said = [("a", "a", "a"), ("a", "a", "b"), ("a", "b")]
    ratings = {str(i): {str(j): what for j, what in enumerate(row)} for i, row in enumerate(said)}
    found = agreement.fleiss({**ratings, "alone": {"0": "b"}})
    # Observed (1 + 1/3 + 0) / 3; by chance (6/8)^2 + (2/8)^2 = 0.625.
    assert found.num_pairs == 3
    assert found.observed == pytest.approx(4 / 9)
    assert found.kappa == pytest.approx((4 / 9 - 0.625) / 0.375)
    assert agreement.fleiss({"alone": {"0": "b"}}).observed is None


# ---- the commands, on what is recorded


def rollout(prompt: str, index: int, response: str, **changes: Any) -> RolloutRow:
    row: RolloutRow = {
        "prompt_id": content_id(prompt),
        "sample_index": index,
        "greedy": False,
        "prompt": prompt,
        "response": response,
        "answer": "4",
        "extra": "{}",
        "prompt_ids": [1],
        "response_ids": [2],
        "logprobs": [-1.0],
        "support": None,
        "loss_mask": None,
        "seed": 100 + index,
        "finish_reason": "stop",
        "environment_reward": None,
        "policy_hash": "weights",
    }
    return {**row, **changes}  # type: ignore[typeddict-item]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with one iteration's rollouts and scores, as dvc.lock records them."""
    rows = sorted(
        [
            rollout("2+2=", 0, "4"),
            rollout("2+2=", 1, "5"),
            rollout("2+2=", 2, "5"),
            rollout("2+2=", 3, "22222", finish_reason="length"),
            rollout("3+3=", 0, "6"),
            rollout("3+3=", 1, "7"),
            rollout("1+1=", 0, "2"),
            rollout("1+1=", 1, "2"),
            rollout("user: hi\n\nassistant: hello", 0, "a", prompt_id="of-a-dialogue"),
            rollout("user: hi\n\nassistant: hello", 1, "b", prompt_id="of-a-dialogue"),
        ],
        key=lambda row: (row["prompt_id"], row["sample_index"]),
    )
    scores: list[ScoreRow] = [
        {
            "prompt_id": row["prompt_id"],
            "sample_index": row["sample_index"],
            "reward": float(row["response"] in ("4", "6")),
            "by_source": [("verifier", float(row["response"] in ("4", "6")))],
            "ref_logprobs": None,
        }
        for row in rows
    ]
    made = {"rollouts": (rows, RolloutRow), "scores": (scores, ScoreRow)}
    outs = {}
    for name, (table, kind) in made.items():
        path = tmp_path / f"artifacts/{name}/iter_001.parquet"
        path.parent.mkdir(parents=True)
        write_parquet(path, table, kind)
        digest = hashlib.md5(path.read_bytes()).hexdigest()
        outs[name] = {"path": f"artifacts/{name}/iter_001.parquet", "hash": "md5", "md5": digest}
    model = {"path": "artifacts/policies/sft/model", "hash": "md5", "md5": f"{'a' * 32}.dir"}
    stages = {
        "rollout@iter_001": {
            "cmd": "rollout",
            "deps": [model],
            "params": {"params.yaml": {"rollout": {"temperature": 0.7, "prompts": 4}}},
            "outs": [outs["rollouts"]],
        },
        "score@iter_001": {
            "cmd": "score",
            "deps": [{**outs["rollouts"]}],
            "outs": [outs["scores"]],
        },
    }
    YAML().dump({"schema": "2.0", "stages": stages}, tmp_path / "dvc.lock")
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    (tmp_path / "params.yaml").write_text("rl:\n  iterations:\n    iter_001: {policy: sft}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(capsys, *words: str) -> dict:
    assert main(["annotate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words: str) -> str:
    assert main(["annotate", *words]) == 2
    return capsys.readouterr().err


def test_pairs_are_drawn_from_rollouts_with_all_that_made_them(clone, capsys):
    found = ask(capsys, "queue", "iter_001", "--annotators", "2")
    assert (found["num_added"], found["num_candidates"]) == (2, 2)
    assert found["left_out"] == {
        "cut off": 1,
        "the same as the prompt's others": 2,
        "of a prompt that the data no longer have": 2,
    }
    assert ask(capsys, "queue", "iter_001", "--annotators", "2")["num_added"] == 0
    asked = {each.messages[0]["content"]: each for each in queue.read_queue(clone).values()}
    assert asked.keys() == {"2+2=", "3+3="}
    one = asked["2+2="].one
    assert one == Response(
        text="4",
        policy="sft",
        policy_hash=f"{'a' * 32}.dir",
        seed=100,
        sampling={"temperature": 0.7},
        sample_index=0,
        finish_reason="stop",
        rewards={"reward": 1.0, "verifier": 1.0},
    )
    assert asked["2+2="].other.sample_index == 1, "of two that say the same, the first"


@pytest.mark.usefixtures("clone")
def test_the_queue_says_what_it_cannot_draw(capsys):
    assert "name either iterations" in refused(capsys, "queue")
    assert "--policies takes two" in refused(capsys, "queue", "--policies", "sft")
    assert "did you mean 'close'" in refused(capsys, "queue", "iter_001", "--strategy", "closed")
    assert "no two sources" in refused(capsys, "queue", "iter_001", "--strategy", "disagreement")
    assert "iter_009" in refused(capsys, "queue", "iter_009")
    assert "-n is a number from 1 up" in refused(capsys, "queue", "iter_001", "-n", "0")


def say(clone: Path, annotator: str, prompt: str, text: str | None) -> None:
    """An annotator prefers this text to the other, or neither."""
    [asked] = [p for p in queue.read_queue(clone).values() if p.messages[0]["content"] == prompt]
    left, _ = asked.sides(annotator)
    chosen = Choice.TIE if text is None else Choice.LEFT if left.text == text else Choice.RIGHT
    queue.judge(clone, annotator, asked.id, chosen)


def test_status_and_export_count_what_most_people_prefer(clone, capsys):
    assert "nothing is judged" in refused(capsys, "export", "data/preferences.jsonl")
    ask(capsys, "queue", "iter_001", "--annotators", "3")
    for who, first, second in (("ann", "4", "6"), ("bo", "4", None), ("cy", "5", "7")):
        say(clone, who, "2+2=", first)
        say(clone, who, "3+3=", second)
    with (clone / "annotations/queue.jsonl").open("a") as file:
        file.write('{"kind": "pa')
    found = ask(capsys, "status")
    assert ["queue.jsonl line 3 was cut off" in note for note in found["notes"]] == [True]
    assert (found["num_done"], found["num_begun"], found["num_ties"]) == (2, 0, 1)
    # One pair with two of three alike, one with three different.
    assert found["fleiss"]["observed"] == pytest.approx((1 / 3 + 0) / 2)
    assert [(each["one"], each["other"], each["observed"]) for each in found["cohens"]] == [
        ("ann", "bo", 0.5),
        ("ann", "cy", 0.0),
        ("bo", "cy", 0.0),
    ]
    [_, verifier] = found["sources"]
    assert verifier == {"name": "verifier", "num_pairs": 1, "num_agreeing": 1, "num_tied": 0}

    exported = ask(capsys, "export", "data/preferences.jsonl")
    assert (exported["num_rows"], exported["left_out"]) == (1, {"ties": 1})
    text = (clone / "data/preferences.jsonl").read_text()
    row = json.loads(text)
    assert row["prompt"] == [{"role": "user", "content": "2+2="}]
    assert row["chosen"] == [{"role": "assistant", "content": "4"}]
    assert row["rejected"] == [{"role": "assistant", "content": "5"}]
    assert row["provenance"]["votes"] == {"chosen": 2, "rejected": 1, "tie": 0}
    assert row["provenance"]["annotators"] == ["ann", "bo", "cy"]
    assert row["provenance"]["chosen"]["seed"] == 100
    ask(capsys, "export", "data/again.jsonl")
    assert (clone / "data/again.jsonl").read_text() == text
    assert "judged by fewer than 4" in refused(capsys, "export", "x.jsonl", "--at-least", "4")
    assert "is among the judgements" in refused(capsys, "export", "annotations/p.jsonl")
    (clone / "own.jsonl").write_text(text.replace("provenance", "from"))
    assert "is no export of judgements" in refused(capsys, "export", "own.jsonl")
    assert "ends in .jsonl" in refused(capsys, "export", "p.csv")


def test_pairs_of_held_out_prompts_are_for_measuring_alone(clone, capsys):
    held_out = Origin(place="queue", prompt_id="p", held_out=True)
    queue.extend(clone, [pair(0), replace(pair(1), origin=replace(held_out, pair="h"))], 1)
    for pair_id in queue.read_queue(clone):
        queue.judge(clone, "ann", pair_id, Choice.LEFT)
    exported = ask(capsys, "export", "preferences.jsonl")
    assert exported["left_out"] == {"of held-out prompts (--held-out)": 1}
    ask(capsys, "export", "held.jsonl", "--held-out")
    rows = [json.loads(Path(name).read_text()) for name in ("preferences.jsonl", "held.jsonl")]
    assert [row["provenance"]["origin"]["held_out"] for row in rows] == [False, True]
