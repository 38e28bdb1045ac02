"""Write the tools of an environment of the user's to a file that prepare.tools names.

python -m stages.environments.list_tools search:Search data/search.tools.json
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.context import StageError
from stages.contracts.sources import TOOLS_SUFFIX
from stages.data.artifacts import write_json
from stages.environments.environment import NoAnswer
from stages.environments.loading import find
from stages.environments.mcp_tools import McpTools
from stages.environments.tool_server import Session

PATIENCE_S = 60


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write an environment's tools to a file.")
    parser.add_argument("environment", help="module:Class, as in rollout.environment")
    parser.add_argument("file", type=Path, help="in prepare.folder; its name ends in .tools.json")
    parser.add_argument("--environments", type=Path, default=Path("environments"))
    asked = parser.parse_args(argv)
    if not asked.file.name.endswith(TOOLS_SUFFIX):
        parser.error(f"{asked.file}: let its name end in {TOOLS_SUFFIX}")
    try:
        kind = find(asked.environment, asked.environments)
        if not issubclass(kind, McpTools):
            raise StageError(f"{asked.environment} is no McpTools: it has no server to be asked")
        tools = asyncio.run(_listed(kind))
    except (StageError, NoAnswer) as error:
        print(error, file=sys.stderr)
        return 1
    # DVC may have linked the file to its cache.
    asked.file.unlink(missing_ok=True)
    write_json(asked.file, tools)
    names = ", ".join(tool["function"]["name"] for tool in tools)
    print(f"{asked.file}: {names or 'no tool'}")
    return 0


async def _listed(kind: type[McpTools]) -> list[dict[str, Any]]:
    session = Session(kind.address())
    try:
        return await asyncio.wait_for(kind.offered(session), PATIENCE_S)
    except TimeoutError:
        raise NoAnswer(f"{session.address} did not list its tools in {PATIENCE_S} s") from None
    finally:
        await session.close()


if __name__ == "__main__":
    sys.exit(main())
