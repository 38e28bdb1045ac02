"""Opens a page of this machine in the user's browser."""

import webbrowser
from pathlib import Path

from pipelines.base.private import write_private


def open_browser(page: Path, link: str) -> None:
    """By way of a file: what a browser is started with, every user of the machine can read."""
    write_private(page, f'<!doctype html><meta http-equiv="refresh" content="0; url={link}">\n')
    webbrowser.open(page.as_uri())
