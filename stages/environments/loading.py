"""The class that `rollout.environment` names: a built-in one, or one of the user's.

A user's environment is `module:Class`, the module a file in the folder `rollout.environments`. The
folder is an input of the stage: importing from it leaves nothing in it, and a changed file is
another input.
"""

import sys
from pathlib import Path
from types import ModuleType

from stages.context import StageError
from stages.environments.calculator import Calculator
from stages.environments.chat_agent import ChatAgent
from stages.environments.environment import Environment
from stages.environments.guess import Guess
from stages.environments.gymnasium_text import GymnasiumText
from stages.environments.mcp_tools import McpTools
from stages.environments.openenv import OpenEnv
from stages.environments.python import Python
from stages.environments.verifiers_env import Verifiers

BUILT_IN: dict[str, type[Environment]] = {
    "calculator": Calculator,
    "guess": Guess,
    "python": Python,
}
ADAPTERS = (ChatAgent, GymnasiumText, McpTools, OpenEnv, Verifiers)
"""What users' classes may extend: named here, they are part of the code of the stages."""


def find(name: str, folder: Path) -> type[Environment]:
    """The class; StageError says what there is, or what it lacks."""
    module_name, colon, class_name = name.partition(":")
    if not colon:
        if name not in BUILT_IN:
            raise StageError(
                f"rollout.environment is {name!r}; there are {', '.join(BUILT_IN)}, and your own "
                "as module:Class"
            )
        return BUILT_IN[name]
    path = folder / f"{module_name}.py"
    if not path.is_file():
        raise StageError(
            f"rollout.environment is {name!r}, but there is no {path}: put the module there, or "
            "name its folder in rollout.environments"
        )
    loaded = getattr(_imported(path), class_name, None)
    if not isinstance(loaded, type) or not issubclass(loaded, Environment):
        raise StageError(
            f"rollout.environment is {name!r}, but {path} has no class {class_name} that is an "
            "Environment of stages.environments.environment"
        )
    return loaded


def _imported(path: Path) -> ModuleType:
    """The module in a file, compiled here: no bytecode is left beside it, and none is reused."""
    module = ModuleType(f"lockstep_environment_{path.stem}")
    module.__file__ = str(path)
    # Dataclasses and pickles look their module up by name.
    sys.modules[module.__name__] = module
    try:
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise StageError(f"{path} does not import: {type(error).__name__}: {error}") from error
    return module
