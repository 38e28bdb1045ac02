"""Up and down the graph, by hashes and not by names."""

from pipelines.identity.spec import Artifact
from pipelines.lineage.stage_run import Job
from pipelines.lineage.target import Target
from pipelines.lineage.tree import Direction, build_tree
from tests.lineage.world import chain, lock, run_index, stage_run, target


def stages(tree: object) -> list[str]:
    return [node.label for node in tree.nodes.values()]  # type: ignore[attr-defined]


def test_up_goes_to_what_was_given() -> None:
    made = chain()
    tree = build_tree(run_index(lock("workspace", *made)), target(made[-1]), Direction.UP)
    assert stages(tree) == ["evaluate_sft", "sft", "prepare", "data"]


def test_down_goes_to_every_reader_of_every_time() -> None:
    first, second = chain(learning_rate=0.1), chain(learning_rate=0.2)
    # The data are the same stage_run in both locks.
    second = (first[0], *second[1:])
    found = run_index(lock("workspace", *second), lock("abc", *first))
    tree = build_tree(found, target(first[0]), Direction.DOWN)
    assert sorted(stages(tree)) == ["evaluate_sft", "evaluate_sft", "prepare", "sft", "sft"]


def test_down_from_an_artifact_leaves_out_the_others_of_its_stage() -> None:
    prepare = stage_run(
        "prepare", {}, {"artifacts/data/prompts.parquet": "p", "artifacts/base": "b"}
    )
    sft = stage_run("sft", {"artifacts/base": "b"}, {"artifacts/policies/sft/model": "m"})
    found = run_index(lock("workspace", prepare, sft))
    tree = build_tree(found, target(prepare, "artifacts/data/prompts.parquet"), Direction.DOWN)
    assert stages(tree) == ["prepare"]


def test_an_input_that_was_made_anew_leads_to_its_old_maker() -> None:
    old, new = chain(learning_rate=0.1), chain(learning_rate=0.2)
    # sft was run again, the evaluation was not.
    workspace = lock("workspace", new[0], new[1], old[2])
    found = run_index(workspace, lock("abc", *old))
    tree = build_tree(found, target(old[2], inside=workspace), Direction.UP)
    sft = next(node.stage_run for node in tree.nodes.values() if node.label == "sft")
    assert sft is old[1]


def test_depth_cuts_and_says_where() -> None:
    made = chain()
    tree = build_tree(run_index(lock("workspace", *made)), target(made[-1]), Direction.UP, depth=1)
    assert stages(tree) == ["evaluate_sft", "sft"]
    assert tree.cut == {made[1].id}


def test_a_maker_recorded_beside_its_reader_wins_over_one_with_equal_bytes() -> None:
    one, other = (
        stage_run("sft", {}, {"artifacts/policies/sft/model": "m"}, params={"seed": seed})
        for seed in (1, 2)
    )
    reader = stage_run("evaluate_sft", {"artifacts/policies/sft/model": "m"}, {"e": "e"})
    there = lock("abc", other, reader)
    tree = build_tree(
        run_index(lock("workspace", one), there), target(reader, inside=there), Direction.UP
    )
    [sft] = [node for node in tree.nodes.values() if node.label == "sft"]
    assert sft.stage_run is other
    assert sft.others == 1


def test_a_folder_that_was_read_whole_leads_to_all_that_was_in_it() -> None:
    evaluations = [
        stage_run(f"evaluate@{key}", {}, {f"artifacts/evaluations/{key}": key})
        for key in ("a", "b")
    ]
    report = stage_run("report", {"artifacts/evaluations": "x.dir"}, {"artifacts/report": "r"})
    found = run_index(lock("workspace", *evaluations, report))
    assert stages(build_tree(found, target(report), Direction.UP)) == [
        "report",
        "evaluate@a",
        "evaluate@b",
    ]
    assert stages(build_tree(found, target(evaluations[0]), Direction.DOWN)) == [
        "evaluate@a",
        "report",
    ]


def test_a_stale_report_is_not_said_to_have_read_what_is_newer() -> None:
    old, new = (
        stage_run("evaluate@a", {}, {"artifacts/evaluations/a": mark}) for mark in ("old", "new")
    )
    report = stage_run("report", {"artifacts/evaluations": "x.dir"}, {"artifacts/report": "r"})
    found = run_index(lock("workspace", new, report), lock("abc", old, report))
    [read] = [
        n.stage_run
        for n in build_tree(found, target(report), Direction.UP).nodes.values()
        if n.label != "report"
    ]
    assert read is old
    assert stages(build_tree(found, target(new), Direction.DOWN)) == ["evaluate@a"]


def test_what_a_report_was_told_counts_more_than_any_lock() -> None:
    old, new = (
        stage_run("evaluate@a", {}, {"artifacts/evaluations/a": mark, "metrics/a.json": mark})
        for mark in ("old", "new")
    )
    graph = {"evaluate@a": {"artifacts/evaluations/a": "old"}, "report": {}}
    report = stage_run("report", {"metrics": "x.dir"}, {"artifacts/report": "r"})
    object.__setattr__(report, "jobs", (Job("entry", "published", None, graph=graph),))
    found = run_index(lock("workspace", new, report), more=(old,))
    assert found.inside(report, "metrics") == [Artifact("metrics/a.json", "old")]


def test_given_data_have_readers_and_no_maker() -> None:
    made = chain()
    given = Target("data", Artifact("data", made[0].inputs["data"]), None, None)
    found = run_index(lock("workspace", *made))
    assert stages(build_tree(found, given, Direction.UP)) == ["data"]
    assert stages(build_tree(found, given, Direction.DOWN)) == [
        "data",
        "prepare",
        "sft",
        "evaluate_sft",
    ]
