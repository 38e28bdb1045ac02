"""The password of a clone's MLflow and Prefect servers: one line in a file that only its owner can
read.

Loopback is open to every user of this machine, and Prefect's worker executes, as its owner,
whatever the server requests. The password is in no command line, address, log or record.
"""

from pathlib import Path

from pipelines.base.private import kept_secret
from pipelines.base.repository import Repository

USER = "lockstep"
"""The user name for MLflow's pages and clients; Prefect has none."""


def password_file(repository: Repository) -> Path:
    return repository.shared_home / "servers.password"


def password_of(repository: Repository) -> str:
    """The password, generated on first use and then kept, as browsers remember it."""
    return kept_secret(password_file(repository))
