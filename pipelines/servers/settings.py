"""Where the servers of `lockstep up` listen, and the variables of their processes and clients."""

import os

from pipelines.base.repository import Repository
from pipelines.servers.password import password_of

HOST = "127.0.0.1"
UI_PORT = 8765
"""Where the pages are, unless something else is there."""


def server_environment(repository: Repository) -> dict[str, str]:
    """Shared by all; without the user's own Prefect settings, which may name another server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    # A network proxy cannot reach this machine's loopback.
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY"), HOST, "localhost"]))
    return {
        **kept,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "PREFECT_HOME": str(repository.shared_home / "prefect"),
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # The flow runs with the code of this clone, whichever one is installed.
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(repository.root), os.environ.get("PYTHONPATH")])
        ),
    }


def prefect_settings(repository: Repository, url: str) -> dict[str, str]:
    """For Prefect's server, its worker and its command line."""
    return {
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_API_AUTH_STRING": password_of(repository),
        "PREFECT_SERVER_API_AUTH_STRING": password_of(repository),
        # The pages call the server that they came from, by whichever name and port a tunnel gives
        # it; pages of other servers may not.
        "PREFECT_UI_API_URL": "/api",
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # SQLite has one writer at a time; on a busy machine the others wait longer than 10 s.
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
        "PREFECT_WORKER_QUERY_SECONDS": "3",
    }
