"""reward_source: a source of rewards that params.yaml names, checked and kept.

It needs nothing of the other stages, so a function that cannot be imported, a schema that is none
or a template without a response is found in the first seconds, and not after SFT and a rollout.
What it leaves, the source's params and the user's folder, is all that scoring by it takes.
"""

from collections.abc import Mapping
from pathlib import Path

from stages.context import Context, StageError
from stages.contracts.rewards import Code, Function, Http, Judge, Model, Paid, RewardSourceConfig
from stages.data.artifacts import write_json
from stages.rewards.judge import read_template
from stages.rewards.local import FunctionScorer
from stages.rewards.named import NamedSource
from stages.rewards.rules import open_rule


def run(
    config: RewardSourceConfig, inputs: Mapping[str, Path], out: Mapping[str, Path], ctx: Context
) -> dict[str, float | int]:
    source = NamedSource(str(ctx.key), config.source, inputs["functions"])
    check(ctx, source)
    out["source"].mkdir()
    source.save(out["source"])
    # It ranks no held-out pairs: many sources need more than a text to say something.
    write_json(out["source"] / "quality.json", {})
    return {"num_files": sum(path.is_file() for path in out["source"].rglob("*"))}


def check(ctx: Context, source: NamedSource) -> None:
    """StageError where the source could score nothing."""
    name, params, folder = source.name, source.params, source.folder
    match params:
        case Function():
            scorer = FunctionScorer(ctx, name, params, folder)
            try:
                scorer.check()
            finally:
                scorer.close()
        case Model():
            from stages.rewards.classifier import check_model

            check_model(name, params, folder)
        case Judge():
            read_template(name, params, folder)
        case Http() | Paid() | Code():
            # Where it will run, there may be a server, or a sandbox, that is not here.
            pass
        case _:
            try:
                open_rule(params.model_dump(mode="json"), folder)
            except (OSError, ValueError) as error:
                raise StageError(
                    f"rewards.{name} ({params.kind}) cannot be used: {error}"
                ) from None
