"""The checks of the environment, each independent of the others."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from pipelines.base.errors import LockstepError
from pipelines.base.redact import redact, without_credentials
from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.config.profiles import ExecutorKind, load_profile, profile_name
from pipelines.doctor.finding import Finding
from pipelines.doctor.slurm import examine_slurm
from pipelines.tracking.openlineage import is_configured
from stages.contracts.catalog import STAGES
from stages.rewards.sandbox.isolation import isolation, remedy
from stages.rewards.sandbox.status import IsolationKind

LEAST_FREE_GB = 2.0
DEVICES = Path("/dev")
_GPUS = ("nvidia[0-9]*", "kfd", "dxg")
"""What shows there that there is a GPU: NVIDIA's, AMD's, one under Windows."""
_CONTROL = ("dvc", "prefect", "mlflow", "submitit", "pydantic")
_TRAIN = ("torch", "transformers", "safetensors", "pyarrow", "numpy")


def examine(repository: Repository) -> list[Finding]:
    """All checks, each independent of the others."""
    checks: list[Callable[[Repository], Iterator[Finding]]] = [
        _python,
        _packages,
        _repository,
        _files,
        _disk,
        _tracking,
        _lineage,
        _sandbox,
        _gpu,
        _slurm,
    ]
    return [finding for check in checks for finding in check(repository)]


def _python(_: Repository) -> Iterator[Finding]:
    fine = (3, 11) <= sys.version_info[:2] <= (3, 12)
    yield Finding("python", fine, sys.version.split()[0], "use Python 3.11 or 3.12")


def _packages(repository: Repository) -> Iterator[Finding]:
    trains_here = _runs_stages_here(repository)
    for extra, names, needed in (("control", _CONTROL, True), ("train", _TRAIN, trains_here)):
        for name in names:
            try:
                yield Finding(name, True, metadata.version(name))
            except metadata.PackageNotFoundError:
                remedy = f"pip install -c constraints.txt -e '.[{extra}]'"
                why = "not installed" if needed else "not installed; only the jobs' nodes need it"
                yield Finding(name, not needed, why, remedy)
    try:
        version = metadata.version("sqlalchemy")
        fine = tuple(int(part) for part in version.split(".")[:2]) < (2, 1)
        remedy = "pip install 'sqlalchemy<2.1': with 2.1 Prefect never creates a scheduled run"
        yield Finding("sqlalchemy", fine, version, remedy)
    except metadata.PackageNotFoundError:
        pass


def _runs_stages_here(repository: Repository) -> bool:
    """Whether the profile in force runs stages in this environment."""
    try:
        profile = load_profile(repository.root, profile_name())
    except LockstepError:
        return True
    return profile.executor is not ExecutorKind.SLURM


def _repository(repository: Repository) -> Iterator[Finding]:
    git = shutil.which("git")
    yield Finding("git", git is not None, git or "not found", "install git")
    inside = (repository.root / ".git").exists()
    yield Finding("git clone", inside, str(repository.root), "run `git init`: DVC needs it")
    dvc = (repository.root / ".dvc").is_dir()
    yield Finding("dvc folder", dvc, str(repository.root / ".dvc"), "run `dvc init`")
    python = shutil.which("python") or "not found"
    fine = Path(python).parent == Path(sys.executable).parent
    remedy = "for `dvc repro`, activate the environment: dvc.yaml calls `python`"
    yield Finding("python on PATH", fine, python, remedy)


def _files(repository: Repository) -> Iterator[Finding]:
    try:
        load_params(repository.root)
        yield Finding("params.yaml", True, "valid")
    except LockstepError as error:
        yield Finding("params.yaml", False, str(error), "mend the file; see docs/params.md")
    for path in sorted((repository.root / "slurm_profiles").glob("*.yaml")):
        try:
            yield Finding(
                f"profile {path.stem}", True, load_profile(repository.root, path.stem).description
            )
        except LockstepError as error:
            yield Finding(f"profile {path.stem}", False, str(error), "mend the file")


def _disk(repository: Repository) -> Iterator[Finding]:
    free = shutil.disk_usage(repository.root).free / 1e9
    yield Finding("free disk", free >= LEAST_FREE_GB, f"{free:.1f} GB", "free some space")
    links = (
        "yes" if _can_link(repository.home) else "no: outputs are copied instead, which is slower"
    )
    yield Finding("hard links", True, links)


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


def _tracking(_: Repository) -> Iterator[Finding]:
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri or not uri.startswith(("http://", "https://")):
        yield Finding("mlflow store", True, redact(uri) if uri else "SQLite under .lockstep")
        return
    import httpx

    try:
        # Without the credentials: they are for MLflow's client, and an error would print them.
        address = f"{without_credentials(uri).rstrip('/')}/health"
        httpx.get(address, timeout=5, follow_redirects=True).raise_for_status()
        yield Finding("mlflow server", True, redact(uri))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        remedy = "start it, or unset MLFLOW_TRACKING_URI; runs go on and are shipped later"
        yield Finding("mlflow server", False, redact(f"{uri}: {error}"), remedy)


def _lineage(repository: Repository) -> Iterator[Finding]:
    if is_configured(repository):
        try:
            yield Finding("openlineage", True, metadata.version("openlineage-python"))
        except metadata.PackageNotFoundError:
            remedy = "pip install -c constraints.txt -e '.[openlineage]'"
            yield Finding("openlineage", False, "configured, but not installed", remedy)


def _sandbox(repository: Repository) -> Iterator[Finding]:
    found = isolation()
    if found.kind is not IsolationKind.NONE:
        yield Finding("code sandbox", True, str(found.kind))
        return
    try:
        sources = load_params(repository.root).rewards.values()
        wanted = any(source.kind == "code" for source in sources)
    except LockstepError:
        wanted = False
    detail = f"none here, so code rewards do not run: {found.detail}"
    yield Finding("code sandbox", not wanted, detail, remedy())


def _gpu(repository: Repository) -> Iterator[Finding]:
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
        yield Finding("gpu", True, detail)
    elif wanted:
        detail = "there is one" if there else f"none here, and the profile {name!r} computes on one"
        yield Finding("gpu", there, detail, "choose another profile, such as `--profile local`")


def _slurm(repository: Repository) -> Iterator[Finding]:
    wanted = None if _runs_stages_here(repository) else profile_name()
    yield from examine_slurm(repository, wanted)


def render(findings: list[Finding]) -> str:
    """One line a check; what is wrong comes with its remedy."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        mark = "ok " if finding.fine else "BAD"
        lines.append(f"{mark}  {finding.check:<{width}}  {finding.detail}".rstrip())
        if not finding.fine and finding.remedy:
            lines.append(f"     {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)
