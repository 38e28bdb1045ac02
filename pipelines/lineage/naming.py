"""Short names for artifacts, derived from the catalog of stages.

`OUT@KEY` is an output, or an input, of a stage by the name that its contract gives it, with the
policy's name for KEY: `rollouts@iter_001`, `policy@sft`. What exists once has no key: `prompts`.
"""

import re
from functools import cache

from stages.contracts.base import Over
from stages.contracts.catalog import STAGES

_HOLE = re.compile(r"\{(\w+)\}")
_PER_POLICY = ("key", "policy")
PREFERRED = ("policy",)
"""Names that win where a path has several: a policy's folder is `policy`, not `model`."""


@cache
def _templates() -> list[tuple[str, str]]:
    """(name, path template) of every output and input; the preferred names first, then outputs."""
    outs = [pair for stage in STAGES.values() for pair in stage.outs.items()]
    inputs = [pair for stage in STAGES.values() for pair in stage.inputs.items()]
    templates = dict.fromkeys([*outs, *inputs])
    return sorted(templates, key=lambda pair: pair[0] not in PREFERRED)


def paths_called(text: str) -> list[str]:
    """The paths that `OUT@KEY` or `OUT` may mean."""
    name, _, key = text.partition("@")
    paths = []
    for called, template in _templates():
        holes = set(_HOLE.findall(template))
        if called != name or not holes <= set(_PER_POLICY) or bool(key) != bool(holes):
            continue
        paths.append(_HOLE.sub(key, template))
    if key in STAGES and STAGES[key].over is Over.ONCE:
        # What a stage makes once may be called by the stage's name: state@sft.
        paths += [path for called, path in STAGES[key].outs.items() if called == name]
    return list(dict.fromkeys(paths))


def short_name(path: str) -> str:
    """`policy@iter_001` for a path that the catalog knows, else the path."""
    for called, template in _templates():
        match = _pattern(template).fullmatch(path)
        if match and set(_HOLE.findall(template)) <= set(_PER_POLICY):
            return "@".join([called, *match.groups()[:1]])
    return path


def role_of(stage: str, path: str, *, among_inputs: bool) -> str:
    """What a stage's contract calls a path that it reads or makes; without one, the path."""
    known = STAGES.get(stage.partition("@")[0])
    if known is not None:
        templates = (known.inputs if among_inputs else known.outs).items()
        fitting = sorted(
            (len(_HOLE.findall(template)), template == f"{{{called}}}", called)
            for called, template in templates
            if _fits(template, path)
        )
        # Where two fit equally well, as two that are nothing but a hole, they tell nothing.
        if fitting and (len(fitting) == 1 or fitting[0][:2] != fitting[1][:2]):
            return fitting[0][2]
        if _fits(known.metrics, path):
            return "metrics"
    return path


def _fits(template: str, path: str) -> bool:
    return _pattern(template).fullmatch(path) is not None


@cache
def _pattern(template: str) -> re.Pattern[str]:
    """A hole is one part of a path, or any path where the template is nothing else."""
    parts = _HOLE.split(template)
    hole = "(.+)" if parts[0] == parts[-1] == "" and len(parts) == 3 else "([^/]+)"
    return re.compile(hole.join(re.escape(part) for part in parts[::2]))
