"""The password of a clone's MLflow and Prefect servers: one line in a file that only its owner can
read.

Loopback is open to every user of this machine, and Prefect's worker executes, as its owner,
whatever the server requests. The password is in no command line, address, log or record.
"""

import os
import secrets
from pathlib import Path

from pipelines.base import atomic
from pipelines.base.repository import Repository

USER = "lockstep"
"""The user name for MLflow's pages and clients; Prefect has none."""


def password_file(repository: Repository) -> Path:
    return repository.shared_home / "servers.password"


def password_of(repository: Repository) -> str:
    """The password, generated on first use and then kept, as browsers remember it."""
    path = password_file(repository)
    password = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if not password:
        password = secrets.token_hex(16)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = atomic.unique(path)
        aside.touch(0o600)
        aside.write_text(f"{password}\n", encoding="utf-8")
        os.replace(aside, path)
    path.chmod(0o600)
    return password
