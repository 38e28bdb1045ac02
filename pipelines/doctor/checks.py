"""The checks of the environment, each independent of the others."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from pipelines.base.console import ago
from pipelines.base.errors import LockstepError
from pipelines.base.redact import redact, without_credentials
from pipelines.base.repository import Repository
from pipelines.config.chosen_profile import profile_name
from pipelines.config.exchange import advice_on_exchange
from pipelines.config.memory import find_shapes
from pipelines.config.params import load_params
from pipelines.config.profiles import ExecutorKind, load_profile
from pipelines.doctor.result import CheckResult
from pipelines.doctor.slurm import examine_slurm
from pipelines.selftest.finding import Verdict
from pipelines.selftest.report import last_report
from pipelines.tracking.notify import problem as notify_problem
from pipelines.tracking.openlineage import is_configured
from stages.contracts.catalog import STAGES
from stages.rewards.sandbox.isolation import isolation, remedy
from stages.rewards.sandbox.values import IsolationKind

LEAST_FREE_GB = 2.0
DEVICES = Path("/dev")
_GPUS = ("nvidia[0-9]*", "kfd", "dxg")
"""What shows there that there is a GPU: NVIDIA's, AMD's, one under Windows."""
_CONTROL = ("dvc", "prefect", "mlflow", "submitit", "pydantic")
_TRAIN = ("torch", "transformers", "safetensors", "pyarrow", "numpy")


def examine(repository: Repository) -> list[CheckResult]:
    """All checks, each independent of the others."""
    checks: list[Callable[[Repository], Iterator[CheckResult]]] = [
        _python,
        _packages,
        _repository,
        _files,
        _exchange,
        _disk,
        _tracking,
        _lineage,
        _notify,
        _sandbox,
        _gpu,
        _slurm,
        _selftest,
    ]
    return [finding for check in checks for finding in check(repository)]


def _python(_: Repository) -> Iterator[CheckResult]:
    fine = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield CheckResult("python", fine, sys.version.split()[0], "use Python 3.11 or 3.12")


def _packages(repository: Repository) -> Iterator[CheckResult]:
    trains_here = _runs_stages_here(repository)
    for extra, names, needed in (("control", _CONTROL, True), ("train", _TRAIN, trains_here)):
        for name in names:
            try:
                yield CheckResult(name, True, metadata.version(name))
            except metadata.PackageNotFoundError:
                remedy = f"pip install -c constraints.txt -e '.[{extra}]'"
                why = "not installed" if needed else "not installed; only the jobs' nodes need it"
                yield CheckResult(name, not needed, why, remedy)
    try:
        version = metadata.version("sqlalchemy")
        fine = tuple(int(part) for part in version.split(".")[:2]) < (2, 1)
        remedy = "pip install 'sqlalchemy<2.1': with 2.1 Prefect never creates a scheduled run"
        yield CheckResult("sqlalchemy", fine, version, remedy)
    except metadata.PackageNotFoundError:
        pass


def _runs_stages_here(repository: Repository) -> bool:
    """Whether the profile in force runs stages in this environment."""
    try:
        profile = load_profile(repository.root, profile_name())
    except LockstepError:
        return True
    return profile.executor is not ExecutorKind.SLURM


def _repository(repository: Repository) -> Iterator[CheckResult]:
    git = shutil.which("git")
    yield CheckResult("git", git is not None, git or "not found", "install git")
    inside = (repository.root / ".git").exists()
    yield CheckResult("git clone", inside, str(repository.root), "run `git init`: DVC needs it")
    dvc = (repository.root / ".dvc").is_dir()
    yield CheckResult("dvc folder", dvc, str(repository.root / ".dvc"), "run `dvc init`")
    python = shutil.which("python") or "not found"
    fine = Path(python).parent == Path(sys.executable).parent
    remedy = "for `dvc repro`, activate the environment: dvc.yaml calls `python`"
    yield CheckResult("python on PATH", fine, python, remedy)


def _files(repository: Repository) -> Iterator[CheckResult]:
    try:
        load_params(repository.root)
        yield CheckResult("params.yaml", True, "valid")
    except LockstepError as error:
        yield CheckResult("params.yaml", False, str(error), "fix the file; see docs/params.md")
    for path in sorted((repository.root / "slurm_profiles").glob("*.yaml")):
        try:
            yield CheckResult(
                f"profile {path.stem}", True, load_profile(repository.root, path.stem).description
            )
        except LockstepError as error:
            yield CheckResult(f"profile {path.stem}", False, str(error), "fix the file")


def _exchange(repository: Repository) -> Iterator[CheckResult]:
    """Whether the params would send a large policy from job to job."""
    try:
        params = load_params(repository.root)
    except LockstepError:
        return  # said by the check of files
    if said := advice_on_exchange(params, find_shapes(repository.root, params).policy):
        yield CheckResult("policies by disk", True, said)


def _disk(repository: Repository) -> Iterator[CheckResult]:
    free = shutil.disk_usage(repository.root).free / 1e9
    yield CheckResult("free disk", free >= LEAST_FREE_GB, f"{free:.1f} GB", "free some space")
    links = (
        "yes" if _can_link(repository.home) else "no: outputs are copied instead, which is slower"
    )
    yield CheckResult("hard links", True, links)


def _can_link(folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    first, second = folder / ".link-a", folder / ".link-b"
    try:
        first.write_text("", encoding="utf-8")
        second.unlink(missing_ok=True)
        os.link(first, second)
        return True
    except OSError:
        return False
    finally:
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)


def _tracking(_: Repository) -> Iterator[CheckResult]:
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri or not uri.startswith(("http://", "https://")):
        yield CheckResult("mlflow store", True, redact(uri) if uri else "SQLite under .lockstep")
        return
    import httpx

    try:
        # Without the credentials: they are for MLflow's client, and an error would print them.
        address = f"{without_credentials(uri).rstrip('/')}/health"
        httpx.get(address, timeout=5, follow_redirects=True).raise_for_status()
        yield CheckResult("mlflow server", True, redact(uri))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        remedy = "start it, or unset MLFLOW_TRACKING_URI; runs go on and are shipped later"
        yield CheckResult("mlflow server", False, redact(f"{uri}: {error}"), remedy)


def _lineage(repository: Repository) -> Iterator[CheckResult]:
    if is_configured(repository):
        try:
            yield CheckResult("openlineage", True, metadata.version("openlineage-python"))
        except metadata.PackageNotFoundError:
            remedy = "pip install -c constraints.txt -e '.[openlineage]'"
            yield CheckResult("openlineage", False, "configured, but not installed", remedy)


def _notify(repository: Repository) -> Iterator[CheckResult]:
    """Whether what the chosen profile's messages need is set, and whether the last one arrived."""
    try:
        notify = load_profile(repository.root, profile_name(None)).notify
    except LockstepError:
        return  # said by the check of files
    if notify is None:
        return
    lacking = [name for name in notify.variables if not os.environ.get(name)]
    if lacking or not notify.ways:
        what = f"{', '.join(lacking)} not set" if lacking else "neither webhook, command nor email"
        remedy = "export it where commands start" if lacking else "add one under `notify`"
        yield CheckResult("notify", False, what, remedy)
    elif said := notify_problem(repository):
        yield CheckResult("notify", False, said, "try it by hand; the next message tries again")
    else:
        yield CheckResult("notify", True, f"{', '.join(notify.on)}: {'; '.join(notify.ways)}")


def _sandbox(repository: Repository) -> Iterator[CheckResult]:
    found = isolation()
    if found.kind is not IsolationKind.NONE:
        yield CheckResult("code sandbox", True, str(found.kind))
        return
    try:
        sources = load_params(repository.root).rewards.values()
        wanted = any(source.kind == "code" for source in sources)
    except LockstepError:
        wanted = False
    detail = f"none here, so code rewards do not run: {found.detail}"
    yield CheckResult("code sandbox", not wanted, detail, remedy())


def _gpu(repository: Repository) -> Iterator[CheckResult]:
    """Whether the profile in force and this machine agree, where stages run on this machine."""
    name = profile_name()
    try:
        profile = load_profile(repository.root, name)
    except LockstepError:
        return
    if profile.executor is ExecutorKind.SLURM:
        return
    wanted = any(profile.resources(stage).device != "cpu" for stage in STAGES)
    there = any(path for kind in _GPUS for path in DEVICES.glob(kind))
    if there and not wanted:
        detail = f"there is one, and the profile {name!r} leaves it alone: try `--profile gpu`"
        yield CheckResult("gpu", True, detail)
    elif wanted:
        detail = "there is one" if there else f"none here, and the profile {name!r} computes on one"
        yield CheckResult("gpu", there, detail, "choose another profile, such as `--profile local`")


def _slurm(repository: Repository) -> Iterator[CheckResult]:
    wanted = None if _runs_stages_here(repository) else profile_name()
    yield from examine_slurm(repository, wanted)


def _selftest(repository: Repository) -> Iterator[CheckResult]:
    """What the nodes themselves were last seen to do: sbatch only says that it would take a job."""
    name = profile_name()
    command = f"`lockstep selftest --profile {name}`"
    last = last_report(repository.home, name)
    if last is None:
        if not _runs_stages_here(repository):
            yield CheckResult("selftest", True, f"never run: {command} proves the nodes")
        return
    detail = f"{ago(last['time'])}: {last['sentence']}"
    remedy = f"see {last['folder']}/report.txt, and repeat {command}"
    yield CheckResult("selftest", last["verdict"] != Verdict.FAILED, detail, remedy)


def render(findings: list[CheckResult]) -> str:
    """One line a check; what is wrong comes with its remedy."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        mark = "ok " if finding.fine else "BAD"
        lines.append(f"{mark}  {finding.check:<{width}}  {finding.detail}".rstrip())
        if not finding.fine and finding.remedy:
            lines.append(f"     {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)
