"""dvc.yaml says what the contracts say; nothing is declared twice and differently."""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo

from pipelines.base.errors import LockstepError
from pipelines.config.params import load_params
from pipelines.dvc_repo.graph import read_graph
from pipelines.dvc_repo.plan import make_plan
from pipelines.identity import code, syntax
from pipelines.identity.code import CODE_COMMAND, CODE_STAGE, map_path
from stages.contracts.base import Over
from stages.contracts.catalog import STAGES, BoundStage, bind_all
from stages.contracts.params import Params

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dvc_stages() -> dict[str, Any]:
    return {stage.addressing: stage for stage in Repo(str(ROOT)).index.stages}


def paths(items: Any) -> set[str]:
    return {Path(item.fs_path).relative_to(ROOT).as_posix() for item in items}


def test_the_graph_has_exactly_the_declared_stages(dvc_stages: dict[str, Any]) -> None:
    assert set(dvc_stages) == {CODE_STAGE, *(bound.address for bound in bind_all(Params()))}


@pytest.mark.parametrize("bound", bind_all(Params()), ids=lambda bound: bound.address)
def test_stage_matches_its_contract(bound: BoundStage, dvc_stages: dict[str, Any]) -> None:
    stage = dvc_stages[bound.address]
    files = [dep for dep in stage.deps if type(dep).__name__ != "ParamsDependency"]
    params = [key for dep in stage.params for key in dep.params]
    assert stage.cmd == f"python -m pipelines stage {bound.address}"
    assert paths(files) == {*bound.inputs.values(), map_path(bound.stage.module)}
    assert sorted(params) == sorted(bound.config.param_keys())
    assert paths(out for out in stage.outs if not out.metric) == set(bound.outs.values())
    # DVC restores no stage that has another output outside its cache.
    assert paths(out for out in stage.outs if out.metric) == {bound.metrics}
    assert all(out.use_cache != bool(out.metric) for out in stage.outs)


def test_the_code_of_every_stage_is_written_by_one_quick_stage(dvc_stages: dict[str, Any]) -> None:
    stage = dvc_stages[CODE_STAGE]
    assert stage.cmd == CODE_COMMAND
    assert paths(stage.outs) == {map_path(stage.module) for stage in STAGES.values()}
    assert not any(out.use_cache for out in stage.outs), "they are in git"
    # What decides on digests decides on the maps.
    rules = {Path(it.__file__).relative_to(ROOT).as_posix() for it in (code, syntax)}
    assert paths(stage.deps) == {"stages", *rules}
    assert not stage.always_changed


def test_sft_and_reward_model_do_not_wait_for_one_another() -> None:
    graph = read_graph(ROOT)
    assert graph["sft"].upstream == ("code", "prepare")
    assert graph["reward_model"].upstream == ("code", "prepare")


def test_stages_have_the_same_names_in_every_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    here = read_graph(ROOT)
    monkeypatch.chdir(ROOT / "docs")
    assert read_graph(ROOT) == here
    assert [stage.address for stage in make_plan(ROOT, ["sft"])] == ["code", "prepare", "sft"]


def test_each_iteration_follows_its_parent() -> None:
    graph = read_graph(ROOT)
    assert set(graph["rollout@iter_002"].upstream) == {"code", "policy_update@iter_001", "prepare"}
    assert "rollout@iter_002" in graph["score@iter_002"].upstream
    assert {"rollout@iter_002", "score@iter_002"} <= set(graph["policy_update@iter_002"].upstream)
    assert "policy_update@iter_002" in graph["evaluate@iter_002"].upstream


def test_the_report_waits_for_every_evaluation() -> None:
    graph = read_graph(ROOT)
    assert {"evaluate_sft", "evaluate@iter_001", "evaluate@iter_003"} <= set(
        graph["report"].upstream
    )


def test_no_job_of_the_loop_needs_more_than_two_models() -> None:
    """Which artifacts with weights a job of the loop may load, besides the critic in `state`."""
    for bound in bind_all(Params()):
        if bound.stage.over is Over.ITERATIONS and bound.stage.name != "evaluate":
            weights = [name for name in bound.inputs if name in ("policy", "reference", "reward")]
            assert len(weights) <= 2, bound.address


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One with the shipped dvc.yaml and params.yaml, and nothing else."""
    for name in ("dvc.yaml", "params.yaml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    Repo.init(str(tmp_path), no_scm=True).close()
    return tmp_path


@pytest.mark.parametrize("name", ["report", "evaluate"])
def test_a_stage_that_dvc_yaml_has_lost_is_not_taken_for_up_to_date(
    repository: Path, name: str
) -> None:
    path = repository / "dvc.yaml"
    before, _, rest = path.read_text().partition(f"\n  {name}:\n")
    path.write_text("\n  ".join([before, *re.split(r"\n  (?=\w)", rest)[1:]]))
    with pytest.raises(LockstepError, match=rf"dvc\.yaml has no stage {name}.*git checkout"):
        make_plan(repository, None, load_params(repository))


@pytest.mark.parametrize(
    ("text", "missing"), [("", "rewards, "), ("prepare: {folder: data}\n", "model.folder")]
)
def test_what_dvc_yaml_reads_and_params_yaml_lacks_is_said_of_params_yaml(
    repository: Path, text: str, missing: str
) -> None:
    (repository / "params.yaml").write_text(text)
    with pytest.raises(LockstepError) as refused:
        read_graph(repository)
    assert str(refused.value).startswith(f"{repository / 'params.yaml'}: ")
    assert missing in str(refused.value)
    assert "prepare.folder" not in str(refused.value) or not text


@pytest.mark.parametrize(
    ("make", "kind"),
    [(os.mkfifo, "not a regular file"), (lambda path: path.symlink_to("gone"), "a broken link")],
)
def test_what_dvc_could_not_read_is_named_before_it_tries(
    repository: Path, make: Callable[[Path], None], kind: str
) -> None:
    (repository / "data/held_out").mkdir(parents=True)
    make(repository / "data/held_out/rows.jsonl")
    with pytest.raises(LockstepError, match=rf"rows\.jsonl, in `prepare\.folder`, is {kind}"):
        make_plan(repository, None, load_params(repository))


def test_a_plan_copes_with_stages_that_dvc_does_not_cache(tmp_path: Path) -> None:
    """A stage of the user's own may have no dependencies, or outputs that persist."""
    (tmp_path / "dvc.yaml").write_text(
        "stages:\n"
        "  free: {cmd: 'echo 1 > a', outs: [a]}\n"
        "  keeps: {cmd: 'echo 1 > b', deps: [a], outs: [{b: {persist: true}}]}\n"
    )
    for words in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(words, cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "repro", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "a").write_text("2")
    assert [stage.cached for stage in make_plan(tmp_path)] == [False, False]


def test_reading_the_graph_draws_no_bars_of_dvcs() -> None:
    from dvc.progress import Tqdm

    read_graph(ROOT)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert Tqdm(total=3, file=Terminal()).disable
