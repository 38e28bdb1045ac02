"""The record of what environments answered: with it, and with their servers off, a rerun is the
same, byte by byte."""

import json
import shutil

import pyarrow.parquet as pq
import pytest

from stages import rollout
from stages.context import ShareDone, StageError, Stopped
from stages.contracts.catalog import bind
from stages.engines.processes import parts
from tests.remote_tools import REMOTE, Server, by_rule, by_turn
from tests.stages.conftest import Interrupted
from tests.stages.test_environments import ROLLOUT, dies_at, playing

__all__ = ["playing"]

EVALUATE, ONLINE = "evaluate_sft", "online@fast"


@pytest.fixture
def serve():
    """A factory of servers."""
    servers = []

    def start(answer=by_rule):
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def remote(playing):
    """A factory of runs that ask a server, or nobody."""

    def make(name, server=None, rollout=None, **changes):
        rollout = {"environment": "remote:Remote", **(rollout or {})}
        run = playing(name, rollout, **changes)
        (run.root / "environments/remote.py").write_text(REMOTE)
        (run.root / "url").write_text(server.url if server else "http://127.0.0.1:9")
        return run

    return make


def hand_over(of, to):
    """What `of` recorded is the record of `to`."""
    shutil.copytree(
        of.root / "artifacts/tool_answers", to.root / "tool_answers", dirs_exist_ok=True
    )


def made(run, *names):
    return {name: run.contents(run.root / "artifacts" / name) for name in names}


SAMPLED = ("rollouts", "tool_answers")


@pytest.mark.parametrize("processes", [0, 2])
def test_with_the_server_off_the_same_rollouts_come_from_the_record(remote, serve, processes):
    """Also of a server that answers differently each time."""
    server = serve(by_turn())
    episodes = {"processes": processes}
    first = remote("first", server, episodes=episodes)
    metrics = first.run(ROLLOUT)
    assert metrics["turns"] > 1
    server.stop()
    again = remote("again", rollout={"tools": "replay"}, episodes=episodes)
    hand_over(first, again)
    assert again.run(ROLLOUT) == metrics
    assert made(again, *SAMPLED) == made(first, *SAMPLED)


def test_samples_that_ask_the_same_get_what_each_was_answered(remote, serve):
    server, same = serve(by_turn()), {"temperature": 0.001}
    first = remote("first", server, same)
    first.run(ROLLOUT)
    server.stop()
    acted = [row for row in first.rows("tool_answers/iter_001") if row["turn"] == 1]
    assert len({row["request"] for row in acted}) < len({row["text"] for row in acted})
    again = remote("again", rollout={"tools": "replay", **same})
    hand_over(first, again)
    again.run(ROLLOUT)
    assert made(again, *SAMPLED) == made(first, *SAMPLED)


def test_the_record_says_what_was_asked_and_answered(remote, serve):
    server = serve()
    run = remote("run", server)
    run.run(ROLLOUT)
    rows = run.rows("tool_answers/iter_001")
    assert len(rows) == len(server.asked)
    by_sample = {}
    for row in rows:
        by_sample.setdefault((row["prompt_id"], row["sample_index"]), []).append(row)
    sampled = run.rows("rollouts/iter_001")
    assert list(by_sample) == [(row["prompt_id"], row["sample_index"]) for row in sampled]
    for sample, of in zip(sampled, by_sample.values(), strict=True):
        assert [row["turn"] for row in of] == list(range(len(of)))
        assert of[0]["action"] is None
        actions = [row["action"] for row in of[1:]]
        for number, row in enumerate(of[1:], 1):
            request = {"prompt": row["prompt_id"], "seed": row["seed"], "actions": actions[:number]}
            assert request in server.asked
            assert {name: row[name] for name in ("text", "reward", "done")} == by_rule(request)
            assert row["action"] in sample["response"]
        assert sum(row["reward"] for row in of) == pytest.approx(sample["environment_reward"])
    assert {row["iteration"] for row in rows} == {"iter_001"}
    assert all(row["error"] is None for row in rows)
    asked = {(row["request"], row["action"]) for row in rows}
    assert len({request for request, _ in asked}) == len(asked)


def test_the_record_does_not_depend_on_who_was_asked_when(remote, serve):
    """Units, shards, threads, processes: the same bytes; times are elsewhere."""
    one, other = remote("one", serve()), remote("other", serve(), episodes={"processes": 1})
    one.run(ROLLOUT)
    expected = made(one, *SAMPLED)
    bound, (inputs, outs) = bind(ROLLOUT, other.params), other.paths(ROLLOUT)
    for path in outs.values():
        path.parent.mkdir(exist_ok=True)
    with pytest.raises(ShareDone):
        rollout.run(bound.config, inputs, outs, other.context(ROLLOUT, shard=1, num_shards=2))
    rollout.run(bound.config, inputs, outs, other.context(ROLLOUT, shard=0, num_shards=2))
    assert made(other, *SAMPLED) == expected
    slowest = json.loads(
        (other.root / "jobs" / ROLLOUT / "tables/slowest_answers.json").read_text()
    )
    times = [row["seconds"] for row in slowest]
    assert len(times) == len(other.rows("tool_answers/iter_001"))
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0


@pytest.mark.parametrize("tools", ["record", "replay"])
def test_a_killed_rollout_goes_on_with_the_same_record(remote, serve, monkeypatch, tools):
    server = serve()
    whole = remote("whole", server)
    whole.run(ROLLOUT)
    cut = remote("cut", server, {"tools": tools})
    if tools == "replay":
        hand_over(whole, cut)
        server.stop()
    monkeypatch.setattr(parts, "_keep", dies_at(3, parts._keep))
    with pytest.raises(RuntimeError, match="killed"):
        cut.run(ROLLOUT)
    monkeypatch.undo()
    cut.run(ROLLOUT)
    assert made(cut, *SAMPLED) == made(whole, *SAMPLED)


def fused(steps=2):
    return {
        "algorithm": "ppo",
        "iterations": {"fast_001": {"policy": "sft"}, "fast_002": {"policy": "fast_001"}},
        "online": {"fast": {"policy": "sft", "steps": steps}},
    }


def test_fused_steps_replay_their_record_and_chained_iterations_do_too(remote, serve):
    server = serve(by_turn())
    first = remote("first", server, rl=fused())
    first.run(ONLINE)
    server.stop()
    again = remote("again", rollout={"tools": "replay"}, rl=fused())
    hand_over(first, again)
    again.run(ONLINE)
    names = (*SAMPLED, "policies/fast/model")
    assert made(again, *names) == made(first, *names)
    again.run_iterations("fast_001", "fast_002")
    for step in (1, 2):
        for name in SAMPLED:
            together = [row for row in first.rows(f"{name}/fast") if row.pop("step") == step]
            assert again.rows(f"{name}/fast_00{step}") == together
            assert together


def test_a_reward_that_the_files_round_is_learnt_from_as_rounded(remote, serve):
    """By fused steps, too, which do not read it back."""
    run = remote("run", serve(), rl=fused())
    run.run(ONLINE)
    run.run_iterations("fast_001", "fast_002")
    policies = run.root / "artifacts/policies"
    assert run.contents(policies / "fast/model") == run.contents(policies / "fast_002/model")


AHEAD = {
    "rl": fused(3),
    "online": {"overlap": True},
    "policy_update": {"mismatch": "token_truncate"},
}


@pytest.mark.parametrize("changes", [{"rl": fused(3)}, AHEAD], ids=["one by one", "ahead"])
def test_fused_steps_that_were_stopped_go_on_with_the_same_record(remote, serve, changes):
    server = serve()
    whole, cut = remote("whole", server, **changes), remote("cut", server, **changes)
    whole.run(ONLINE)
    folder = cut.context(ONLINE).folder
    stopping = Interrupted(ONLINE, "fast", cut.params.seed, folder, checkpoint_seconds=0)
    stopping.stop_after = 2
    with pytest.raises(Stopped):
        cut.run(ONLINE, stopping)
    cut.run(ONLINE)
    assert made(cut, *SAMPLED) == made(whole, *SAMPLED)
    assert {row["step"] for row in cut.rows("tool_answers/fast")} == {1, 2, 3}


def test_steps_whose_responses_are_sampled_ahead_are_recorded_and_replayed(remote, serve):
    changes = AHEAD
    server = serve(by_turn())
    first = remote("first", server, **changes)
    first.run(ONLINE)
    server.stop()
    again = remote("again", rollout={"tools": "replay"}, **changes)
    hand_over(first, again)
    again.run(ONLINE)
    assert made(again, *SAMPLED) == made(first, *SAMPLED)
    assert {row["step"] for row in first.rows("tool_answers/fast")} == {1, 2, 3}


def test_an_evaluation_replays_what_it_was_answered(remote, serve):
    server = serve(by_turn())
    first = remote("first", server)
    metrics = first.run(EVALUATE)
    server.stop()
    again = remote("again", rollout={"tools": "replay"})
    hand_over(first, again)
    assert again.run(EVALUATE) == metrics
    names = ("evaluations", "tool_answers/evaluations")
    assert made(again, *names) == made(first, *names)


def drop(run, unwanted):
    """Take rows out of a run's record; they are returned."""
    path = run.root / "tool_answers/iter_001.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    left = [row for row in rows if not unwanted(row)]
    pq.write_table(table.from_pylist(left, schema=table.schema), path)
    return [row for row in rows if unwanted(row)]


@pytest.mark.parametrize("failed", ["fail", "drop", "end"])
def test_what_the_record_lacks_is_named(remote, serve, failed):
    first = remote("first", serve())
    first.run(ROLLOUT)
    again = remote("again", rollout={"tools": "replay"}, episodes={"failed": failed})
    hand_over(first, again)
    [asked] = first.rows("tool_answers/iter_001")[1:2]
    gone = drop(again, lambda row: row["request"] == asked["request"])
    with pytest.raises(StageError) as refused:
        again.run(ROLLOUT)
    said = str(refused.value)
    assert any(f"prompt {row['prompt_id']}, sample {row['sample_index']} " in said for row in gone)
    assert f"no answer to the action {asked['action']!r} in turn 1 " in said
    assert "of iter_001" in said
    assert "Set rollout.tools: record" in said


@pytest.mark.parametrize("change", ["answer", "seed", "environment"])
def test_another_question_is_not_answered_from_the_record(remote, serve, change):
    """The row, the seed and the environment are part of it."""
    first = remote("first", serve())
    first.run(ROLLOUT)
    other = {"environment": "remote:Leaks"} if change == "environment" else {}
    seed = {"seed": 18} if change == "seed" else {}
    again = remote("again", rollout={"tools": "replay", **other}, **seed)
    if change == "answer":
        again.rewrite("data/prompts", lambda _: {"answer": "7"})
    hand_over(first, again)
    with pytest.raises(StageError, match=r"has no answer to the start in turn 0 of prompt \w+"):
        again.run(ROLLOUT)


def test_only_what_the_record_lacks_is_asked(remote, serve):
    """An environment that was made for it has heard the turns before."""
    first, server = remote("first", serve()), serve()
    first.run(ROLLOUT)
    again = remote("again", server)
    hand_over(first, again)
    lacked = {row["request"] for row in drop(again, lambda row: row["turn"] == 2)}
    again.run(ROLLOUT)
    assert made(again, *SAMPLED) == made(first, *SAMPLED)
    rows = again.rows("tool_answers/iter_001")
    assert len(server.asked) == sum(3 for row in rows if row["request"] in lacked)
    assert lacked


def test_what_is_asked_after_a_recorded_turn_has_heard_that_turn(remote, serve):
    """Though an environment was made before, for a turn that is not recorded either."""
    first, server = remote("first", serve()), serve()
    first.run(ROLLOUT)
    again = remote("again", server)
    hand_over(first, again)
    lacked = drop(again, lambda row: row["turn"] in (1, 3))
    assert {row["turn"] for row in lacked} == {1, 3}
    again.run(ROLLOUT)
    assert made(again, *SAMPLED) == made(first, *SAMPLED)


def test_a_sample_finds_what_another_was_answered_to_the_same_request(remote, serve):
    first = remote("first", serve())
    first.run(ROLLOUT)
    again = remote("again", rollout={"tools": "replay"})
    hand_over(first, again)
    moved = again.root / "tool_answers/iter_001.parquet"
    table = pq.read_table(moved)
    rows = [{**row, "iteration": "iter_000"} for row in table.to_pylist()]
    pq.write_table(table.from_pylist(rows, schema=table.schema), moved)
    again.run(ROLLOUT)
    assert made(again, *SAMPLED) == made(first, *SAMPLED)


def test_a_tool_that_answers_differently_cannot_go_on_from_a_record(remote, serve):
    answers = by_turn()
    first = remote("first", serve(answers))
    first.run(ROLLOUT)
    again = remote("again", serve(answers))
    hand_over(first, again)
    drop(again, lambda row: row["turn"] == 2)
    problem = "made anew to answer what the record lacks, it answered.*empty rollout.tool_record"
    with pytest.raises(StageError, match=problem):
        again.run(ROLLOUT)


def fails_some(request):
    """500 for what begins with an odd seed, at its second turn."""
    return None if len(request["actions"]) == 2 and request["seed"] % 2 else by_rule(request)


@pytest.mark.parametrize("failed", ["drop", "end"])
def test_failures_are_replayed_and_asked_again_when_recording(remote, serve, failed):
    server, episodes = serve(fails_some), {"failed": failed}
    first = remote("first", server, episodes=episodes)
    metrics = first.run(ROLLOUT)
    assert metrics["episodes_failed"] > 0
    server.stop()
    again = remote("again", rollout={"tools": "replay"}, episodes=episodes)
    hand_over(first, again)
    assert again.run(ROLLOUT) == metrics
    assert made(again, *SAMPLED) == made(first, *SAMPLED)
    errors = [row["error"] for row in again.rows("tool_answers/iter_001") if row["error"]]
    assert len(errors) == metrics["episodes_failed"]
    assert all("HTTPError: HTTP Error 500" in error for error in errors)
    mended = remote("mended", serve(), episodes=episodes)
    hand_over(first, mended)
    assert mended.run(ROLLOUT)["episodes_failed"] == 0
    whole = remote("whole", serve())
    whole.run(ROLLOUT)
    assert made(mended, *SAMPLED) == made(whole, *SAMPLED)


SECRET = "correct-horse-battery"


@pytest.mark.parametrize(
    ("name", "said"),
    [("Leaks", "value of the environment variable OF_TESTS_API_KEY"), ("RaisesIt", "the key ***")],
)
@pytest.mark.parametrize("tools", ["live", "record"])
def test_a_secret_reaches_neither_the_record_nor_the_rollouts(
    remote, serve, monkeypatch, name, said, tools
):
    monkeypatch.setenv("OF_TESTS_API_KEY", SECRET)
    changes = {"environment": f"remote:{name}", "tools": tools}
    run = remote("run", serve(), changes, episodes={"failed": "end"})
    run.run(ROLLOUT)
    errors = {row["error"] for row in run.rows("tool_answers/iter_001")} - {None}
    assert len(errors) == (tools == "record")
    assert all(said in error for error in errors)
    files = [*(run.root / "artifacts").rglob("*.parquet")]
    texts = [json.dumps(pq.read_table(file).to_pylist()) for file in files]
    texts += [path.read_text() for path in (run.root / "jobs").rglob("*") if path.is_file()]
    assert said.replace('"', "") in " ".join(texts)
    assert not any(SECRET in text for text in texts)


def test_a_text_that_no_file_can_hold_is_a_failure(remote, serve):
    run = remote("run", serve(), {"environment": "remote:Torn"})
    with pytest.raises(StageError, match="the text of its answer cannot be encoded"):
        run.run(ROLLOUT)


def test_live_and_recorded_rollouts_are_the_same(remote, serve):
    live, kept = remote("live", serve(), {"tools": "live"}), remote("kept", serve())
    assert live.run(ROLLOUT) == kept.run(ROLLOUT)
    assert made(live, "rollouts") == made(kept, "rollouts")
    assert live.rows("tool_answers/iter_001") == []
    assert kept.rows("tool_answers/iter_001")


def test_nothing_is_read_or_recorded_without_an_environment(playing):
    runs = [
        playing(tools, {"environment": None, "tools": tools}, {"reward": "verifier"})
        for tools in ("live", "record", "replay")
    ]
    for run in runs:
        run.run(ROLLOUT)
        assert run.rows("tool_answers/iter_001") == []
    assert made(runs[0], *SAMPLED) == made(runs[1], *SAMPLED) == made(runs[2], *SAMPLED)


def test_a_folder_that_is_no_record_is_refused(remote, serve):
    first = remote("first", serve())
    first.run(ROLLOUT)
    again = remote("again", rollout={"tools": "replay"})
    folder = again.root / "tool_answers"

    def refuse(problem):
        with pytest.raises(StageError, match=problem):
            again.run(ROLLOUT)

    refuse(r"no record \(\*.parquet\) in .*tool_answers: copy artifacts/tool_answers")
    (folder / "torn.parquet").write_bytes(b"PAR1")
    refuse(r"torn.parquet cannot be read as a record")
    (folder / "torn.parquet").unlink()
    shutil.copy(again.root / "artifacts/data/prompts.parquet", folder)
    refuse(r"prompts.parquet has no column 'iteration'.*remove it")
    (folder / "prompts.parquet").unlink()
    hand_over(first, again)
    (folder / "other").mkdir()
    shutil.copy(folder / "iter_001.parquet", folder / "other")
    again.run(ROLLOUT)
    table = pq.read_table(folder / "iter_001.parquet")
    rows = table.to_pylist()
    rows[1]["text"] += "1"
    pq.write_table(table.from_pylist(rows, schema=table.schema), folder / "other/x.parquet")
    refuse(r"x.parquet: another file in .* has another answer to turn 1 .*the record of one run")
