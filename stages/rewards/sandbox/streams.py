"""The standard streams, out of the way of code that reads or prints."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO


def take_streams() -> tuple[BinaryIO, BinaryIO, BinaryIO]:
    mine = [os.dup(stream) for stream in range(3)]
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    return (
        os.fdopen(mine[0], "rb"),
        os.fdopen(mine[1], "wb", buffering=0),
        os.fdopen(mine[2], "wb", buffering=0),
    )
