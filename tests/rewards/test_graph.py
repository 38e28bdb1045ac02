"""What named sources make stale: scores, and never what was generated."""

import pytest

from pipelines.dvc_repo.graph import read_graph
from pipelines.dvc_repo.plan import make_plan
from stages.contracts.catalog import bind_all
from tests.conftest import Clone

SOURCES = {"right": {"kind": "maths"}, "mine": {"kind": "function", "function": "example:brief"}}


@pytest.fixture
def rewarded(clone: Clone) -> Clone:
    clone.set_params(
        rewards=SOURCES, rl__reward="right", score__weights={"right": 1.0, "mine": 0.1}
    )
    clone.set_params(rl__iterations={"iter_001": {"policy": "sft"}})
    return clone


def test_a_source_has_a_node_and_no_reward_model_is_asked_for(rewarded: Clone) -> None:
    from pipelines.config.params import load_params

    graph = read_graph(rewarded.root)
    assert {"reward_source@right", "reward_source@mine"} <= set(graph)
    assert graph["reward_source@mine"].upstream == ("code",)
    assert set(graph) - {"code"} == {
        bound.address for bound in bind_all(load_params(rewarded.root))
    }
    assert set(graph["score@iter_001"].upstream) == {
        "code",
        "prepare",
        "sft",
        "rollout@iter_001",
        "reward_source@right",
    }
    planned = {stage.address for stage in make_plan(rewarded.root, ["report"])}
    assert "reward_model" not in planned
    assert "reward_source@right" in planned
    assert "reward_source@mine" not in planned, "score reads its params and its function itself"


@pytest.mark.parametrize("change", ["function", "weight", "source"])
def test_a_changed_reward_scores_again_and_generates_nothing(rewarded: Clone, change: str) -> None:
    """The outputs are made up and committed as they are: only the graph is asked."""
    for bound in bind_all_of(rewarded):
        for path in (*bound.outs.values(), bound.metrics):
            target = rewarded.root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(f"{path}\n")
    (rewarded.root / "models/.gitkeep").touch()
    rewarded.run("dvc", "commit", "-f", "-q")
    assert [stage.address for stage in make_plan(rewarded.root, ["report"]) if stage.stale] == []
    if change == "function":
        path = rewarded.root / "rewards/example.py"
        path.write_text(path.read_text() + "\n# another thought\n")
    elif change == "weight":
        rewarded.set_params(score__weights={"right": 1.0, "mine": 0.2})
    else:
        rewarded.set_params(rewards={**SOURCES, "mine": {**SOURCES["mine"], "batch_size": 8}})
    stale = {stage.address for stage in make_plan(rewarded.root, ["report"]) if stage.stale}
    assert "score@iter_001" in stale
    assert not stale & {"rollout@iter_001", "sft", "prepare"}


def bind_all_of(clone: Clone):
    from pipelines.config.params import load_params

    return bind_all(load_params(clone.root))
