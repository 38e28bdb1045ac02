"""Files that only their owner can read, from their first byte on."""

import os
import secrets
from pathlib import Path

from pipelines.base import atomic


def kept_secret(path: Path) -> str:
    """The secret in a file, made on first use and then kept."""
    secret = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if not secret:
        secret = secrets.token_hex(16)
        write_private(path, f"{secret}\n")
    path.chmod(0o600)
    return secret


def write_private(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = atomic.unique(path)
    aside.touch(0o600)
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
