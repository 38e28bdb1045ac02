"""The planes stay apart: no torch in the control plane, no server's client in the compute plane."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.identity.code import code_map
from stages.contracts.catalog import STAGES

ROOT = Path(__file__).resolve().parents[2]


def modules_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after a statement."""
    program = f"{statement}\nimport sys, json\nprint(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def command(*words: str) -> str:
    return (
        "import contextlib, io\nfrom pipelines.commands.cli import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()): assert main({list(words)}) == 0"
    )


@pytest.mark.parametrize("words", [("status",), ("plan",)])
def test_plan_and_status_import_no_torch_mlflow_or_prefect(words: tuple[str, ...]) -> None:
    assert not modules_after(command(*words)) & {"torch", "transformers", "mlflow", "prefect"}


def test_the_driver_of_a_stage_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "mlflow", "prefect", "dvc", "pandas", "numpy"}
    assert not modules_after("import pipelines.driver.stage") & heavy


def test_lineage_imports_nothing_heavy_before_it_is_needed() -> None:
    heavy = {"torch", "transformers", "mlflow", "prefect", "dvc", "pandas", "numpy", "pyarrow"}
    modules = "pipelines.lineage.answer, pipelines.lineage.page, pipelines.lineage.rows_text"
    assert not modules_after(f"import {modules}") & heavy


def test_contracts_import_no_torch() -> None:
    assert not modules_after("import stages.contracts.catalog") & {"torch", "numpy"}


def test_the_command_of_a_self_test_imports_no_torch() -> None:
    assert not modules_after("import pipelines.selftest.job") & {"torch", "transformers", "dvc"}


def test_the_pages_import_no_torch() -> None:
    heavy = {"torch", "transformers", "mlflow", "prefect"}
    assert not modules_after("import pipelines.ui.serve") & heavy


OF_A_SELFTEST = [f"stages.selftest.{name}" for name in ("collectives", "compute", "sampler")]


@pytest.mark.parametrize(
    "module",
    sorted({*(stage.module for stage in STAGES.values()), *OF_A_SELFTEST}),
)
def test_stages_name_no_package_of_the_control_plane(module: str) -> None:
    forbidden = ("dvc", "prefect", "mlflow", "submitit", "pipelines")
    for file in code_map(ROOT, module):
        for line in (ROOT / file).read_text().splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]):
                assert words[1].split(".")[0] not in forbidden, f"{file}: {line}"
