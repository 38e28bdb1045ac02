"""The plots that dvc.yaml declares draw the report's curves, of one revision or of several."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from stages.reporting.curves import COLUMNS
from tests.control.recorded_policies import Recorded

ROOT = Path(__file__).resolve().parents[2]
CURVES = "artifacts/report/curves.csv"
GRAPH = """\
stages:
  report:
    cmd: echo report
    params: [policy_update]
    deps: [given.txt]
    outs: [artifacts/report]
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Two reports, the first one tagged, under the project's own plots."""
    clone = Recorded(tmp_path_factory.mktemp("plots") / "clone")
    plots = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["plots"]
    (clone.root / "dvc.yaml").write_text(f"{GRAPH}plots: {json.dumps(plots)}\n")
    for name, accuracy in (("first", 0.25), (None, 0.75)):
        clone.params(accuracy, "iter_001")
        path = clone.root / CURVES
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        rows = [f"0,sft{',0.125' * len(COLUMNS)}", f"1,iter_001{f',{accuracy}' * len(COLUMNS)}"]
        path.write_text("\n".join([",".join(["iteration", "policy", *COLUMNS]), *rows]) + "\n")
        clone.record(f"accuracy {accuracy}", name)
    return clone


def dvc(clone: Recorded, *words: str) -> str:
    command = [sys.executable, "-m", "dvc", *words]
    done = subprocess.run(command, cwd=clone.root, capture_output=True, text=True, check=True)
    return done.stdout


def test_every_curve_is_drawn_for_both_revisions(clone: Recorded):
    drawn = json.loads(dvc(clone, "plots", "diff", "first", "--json"))
    assert not drawn.get("errors")
    assert set(drawn["data"]) == {
        "accuracy",
        "reward",
        "KL to the SFT policy",
        "entropy",
        "response length",
    }
    for name, plots in drawn["data"].items():
        revisions = {revision for plot in plots for revision in plot["revisions"]}
        assert revisions == {"workspace", "first"}, name
        text = json.dumps(plots)
        assert "0.25" in text, name
        assert "0.75" in text, name


def test_the_page_has_the_curves_of_the_workspace(clone: Recorded, tmp_path: Path):
    dvc(clone, "plots", "show", "-o", str(tmp_path / "drawn"))
    page = (tmp_path / "drawn/index.html").read_text()
    assert all(name in page for name in ("accuracy_sampled", "kl_to_reference", "entropy"))
    assert "0.75" in page
    assert "0.25" not in page.replace("0.250", "")
