"""The file in the data's folder with the tools that every prompt offers, as templates take them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.context import StageError
from stages.data.formats.messages import tools_of
from stages.data.row_error import RowError


def read_tools(name: str | None, folder: Path) -> Sequence[Mapping[str, Any]]:
    """Those of the file that prepare.tools names; none where it names none."""
    if name is None:
        return ()
    path = folder / name
    where = f"prepare.tools is {name}, and {path}"
    if not path.is_file():
        raise StageError(
            f"{where} is no file: write it with `python -m stages.environments.list_tools`"
        )
    try:
        tools = tools_of(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RowError) as error:
        raise StageError(f"{where} is no list of tools in JSON: {error}") from None
    if not tools:
        raise StageError(f"{where} has no tool: set prepare.tools to null to offer none")
    return tools
