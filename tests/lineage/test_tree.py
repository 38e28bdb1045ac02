"""Up and down the graph, by hashes and not by names."""

from pipelines.lineage.evidence import Artifact
from pipelines.lineage.making import Job
from pipelines.lineage.target import Target
from pipelines.lineage.tree import Way, grow
from tests.lineage.world import chain, evidence, lock, making, target


def stages(tree: object) -> list[str]:
    return [node.label for node in tree.nodes.values()]  # type: ignore[attr-defined]


def test_up_goes_to_what_was_given() -> None:
    made = chain()
    tree = grow(evidence(lock("workspace", *made)), target(made[-1]), Way.UP)
    assert stages(tree) == ["evaluate_sft", "sft", "prepare", "data"]


def test_down_goes_to_every_reader_of_every_time() -> None:
    first, second = chain(learning_rate=0.1), chain(learning_rate=0.2)
    # The data are the same making in both locks.
    second = (first[0], *second[1:])
    found = evidence(lock("workspace", *second), lock("abc", *first))
    tree = grow(found, target(first[0]), Way.DOWN)
    assert sorted(stages(tree)) == ["evaluate_sft", "evaluate_sft", "prepare", "sft", "sft"]


def test_down_from_an_artifact_leaves_out_the_others_of_its_stage() -> None:
    prepare = making("prepare", {}, {"artifacts/data/prompts.parquet": "p", "artifacts/base": "b"})
    sft = making("sft", {"artifacts/base": "b"}, {"artifacts/policies/sft/model": "m"})
    found = evidence(lock("workspace", prepare, sft))
    tree = grow(found, target(prepare, "artifacts/data/prompts.parquet"), Way.DOWN)
    assert stages(tree) == ["prepare"]


def test_an_input_that_was_made_anew_leads_to_its_old_maker() -> None:
    old, new = chain(learning_rate=0.1), chain(learning_rate=0.2)
    # sft was run again, the evaluation was not.
    workspace = lock("workspace", new[0], new[1], old[2])
    found = evidence(workspace, lock("abc", *old))
    tree = grow(found, target(old[2], inside=workspace), Way.UP)
    sft = next(node.making for node in tree.nodes.values() if node.label == "sft")
    assert sft is old[1]


def test_depth_cuts_and_says_where() -> None:
    made = chain()
    tree = grow(evidence(lock("workspace", *made)), target(made[-1]), Way.UP, depth=1)
    assert stages(tree) == ["evaluate_sft", "sft"]
    assert tree.cut == {made[1].id}


def test_a_maker_recorded_beside_its_reader_wins_over_one_with_equal_bytes() -> None:
    one, other = (
        making("sft", {}, {"artifacts/policies/sft/model": "m"}, params={"seed": seed})
        for seed in (1, 2)
    )
    reader = making("evaluate_sft", {"artifacts/policies/sft/model": "m"}, {"e": "e"})
    there = lock("abc", other, reader)
    tree = grow(evidence(lock("workspace", one), there), target(reader, inside=there), Way.UP)
    [sft] = [node for node in tree.nodes.values() if node.label == "sft"]
    assert sft.making is other
    assert sft.others == 1


def test_a_folder_that_was_read_whole_leads_to_all_that_was_in_it() -> None:
    evaluations = [
        making(f"evaluate@{key}", {}, {f"artifacts/evaluations/{key}": key}) for key in ("a", "b")
    ]
    report = making("report", {"artifacts/evaluations": "x.dir"}, {"artifacts/report": "r"})
    found = evidence(lock("workspace", *evaluations, report))
    assert stages(grow(found, target(report), Way.UP)) == ["report", "evaluate@a", "evaluate@b"]
    assert stages(grow(found, target(evaluations[0]), Way.DOWN)) == ["evaluate@a", "report"]


def test_a_stale_report_is_not_said_to_have_read_what_is_newer() -> None:
    old, new = (
        making("evaluate@a", {}, {"artifacts/evaluations/a": mark}) for mark in ("old", "new")
    )
    report = making("report", {"artifacts/evaluations": "x.dir"}, {"artifacts/report": "r"})
    found = evidence(lock("workspace", new, report), lock("abc", old, report))
    [read] = [
        n.making for n in grow(found, target(report), Way.UP).nodes.values() if n.label != "report"
    ]
    assert read is old
    assert stages(grow(found, target(new), Way.DOWN)) == ["evaluate@a"]


def test_what_a_report_was_told_counts_more_than_any_lock() -> None:
    old, new = (
        making("evaluate@a", {}, {"artifacts/evaluations/a": mark, "metrics/a.json": mark})
        for mark in ("old", "new")
    )
    graph = {"evaluate@a": {"artifacts/evaluations/a": "old"}, "report": {}}
    report = making("report", {"metrics": "x.dir"}, {"artifacts/report": "r"})
    object.__setattr__(report, "jobs", (Job("entry", "published", None, graph=graph),))
    found = evidence(lock("workspace", new, report), more=(old,))
    assert found.inside(report, "metrics") == [Artifact("metrics/a.json", "old")]


def test_given_data_have_readers_and_no_maker() -> None:
    made = chain()
    given = Target("data", Artifact("data", made[0].inputs["data"]), None, None)
    found = evidence(lock("workspace", *made))
    assert stages(grow(found, given, Way.UP)) == ["data"]
    assert stages(grow(found, given, Way.DOWN)) == ["data", "prepare", "sft", "evaluate_sft"]
