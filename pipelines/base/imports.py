"""Imports of large libraries, without Python's search for garbage in what is only being made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """What the block imports is made without that search, and spared it afterwards.

    Modules stay as long as their process. Of a stage's libraries the search takes a sixth of the
    time that it takes to import them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
