"""One MLflow and Prefect for all tests of this folder: starting them takes half a minute."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from prefect_servers import LocalServers, send_what_waits, serving
from tiny_project import TinyProject, make_project

from pipelines.base.repository import Repository
from pipelines.warm.client import end_servers
from tests.forks import fork_servers


@pytest.fixture(scope="session", autouse=True)
def _no_tracking() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_TRACKING", "off")
        for name in [name for name in os.environ if name.startswith(("PREFECT_", "DVC_"))]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def local_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServers]:
    project = make_project(tmp_path_factory.mktemp("servers") / "project")
    with serving(project.root) as local:
        yield local
        send_what_waits()


@pytest.fixture
def served_project(local_servers: LocalServers) -> TinyProject:
    """The project that the shared servers run in, with every stage stale."""
    project = TinyProject(local_servers.repository.root)
    project.forget()
    project.behave()
    return project


@pytest.fixture
def project(
    local_servers: LocalServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TinyProject]:
    """A fresh project around this process, whose flow runs go to the shared Prefect server."""
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        PREFECT_HOME,
        temporary_settings,
    )

    project = make_project(tmp_path / "project")
    fork_servers(project.root, dict(os.environ), None)
    monkeypatch.chdir(project.root)
    settings = {
        PREFECT_API_URL: local_servers.api.url,
        PREFECT_API_AUTH_STRING: local_servers.password,
        PREFECT_HOME: tmp_path / "prefect",
    }
    with temporary_settings(settings):
        yield project
    end_servers(Repository(project.root))
