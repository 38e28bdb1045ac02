"""Which clone a command is for: `user@login:folder`, as given, or as remembered for this clone."""

import os
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.base.errors import LockstepError
from pipelines.base.git import git

VARIABLE = "LOCKSTEP_HOST"
SETTING = "lockstep.host"
"""Of git, in this clone: `git config lockstep.host user@login:folder`."""
PYTHON_SETTING = "lockstep.hostPython"
HERE = "."
"""What stands for this machine, where another one is remembered."""
_FORM = re.compile(r"((?:[^@\s]+@)?)(?:\[([^\]\s]+)\]|([^:@\[\]\s]+))(?::(.*))?")


@dataclass(frozen=True)
class Host:
    """A clone on another machine."""

    address: str
    """As ssh takes it: user@login, or a name of ~/.ssh/config."""
    folder: str
    """Absolute, or below the home folder there: then it begins with `./`."""
    python: str = ".venv/bin/python"
    """The environment's Python there, absolute or below the folder."""

    @property
    def name(self) -> str:
        return f"{self._for_git}:{self.folder.removeprefix('./')}"

    @property
    def url(self) -> str:
        """As git takes it."""
        return f"{self._for_git}:{self.folder}"

    @property
    def _for_git(self) -> str:
        user, at, machine = self.address.rpartition("@")
        return f"{user}{at}[{machine}]" if ":" in machine else self.address

    def by_hand(self, command: str, *, terminal: bool = False) -> str:
        """What to type here to have a command run in the folder there."""
        there = f"cd {shlex.quote(self.folder)} && {command}"
        return f"ssh {'-t ' if terminal else ''}{shlex.quote(self.address)} {shlex.quote(there)}"


def chosen_host(option: str | None, root: Path) -> Host | None:
    """The host of the option, else of LOCKSTEP_HOST, else of git's settings; None: this machine."""
    remembered = (git(root, "config", "--get", SETTING) or "").strip()
    places = (
        ("--host", option),
        (VARIABLE, os.environ.get(VARIABLE)),
        (f"git config {SETTING}", remembered),
    )
    where, text = next(((where, text) for where, text in places if text), ("", HERE))
    if text == HERE:
        return None
    host = parse_host(text, where, root.name)
    python = (git(root, "config", "--get", PYTHON_SETTING) or "").strip()
    return replace(host, python=python) if python else host


def parse_host(text: str, where: str, default_folder: str) -> Host:
    """`user@login:folder`; `where` names who gave it, for errors."""
    form = _FORM.fullmatch(text)
    # ssh would take what begins with a dash for an option.
    machine_is_option = form and (form[2] or form[3]).startswith("-")
    if form is None or machine_is_option or text.startswith("-") or "\0" in text or "\n" in text:
        raise LockstepError(
            f"{where}: {text!r} is no host: write user@login:folder, or a name of ~/.ssh/config "
            f"(folder: {default_folder} in the home folder there, unless given); {HERE} is this "
            "machine"
        )
    user, six, machine, folder = form.groups()
    folder = (folder or default_folder).rstrip("/") or "/"
    folder = folder.removeprefix("~/").removeprefix("./")
    if folder.startswith("~"):
        raise LockstepError(f"{where}: {text!r}: write the folder of the clone in full")
    return Host(user + (six or machine), folder if folder.startswith("/") else f"./{folder}")
