from typing import Annotated

import typer

from pipelines.commands.options import Json


def lm_eval(
    policy: Annotated[str, typer.Argument(help="sft, iter_001, ...")],
    tasks: Annotated[
        str, typer.Option(metavar="A,B", help="task names that lm-eval knows, or your own")
    ],
    include_path: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="a folder with your own task files (YAML)"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="only the first N of each task")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(metavar="N", help="examples in the prompt")
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option(metavar="N", help="a number, or auto (default: lm-eval's)")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda:0, ... (default: lm-eval's choice)")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="put prompts through the model's chat template")
    ] = False,
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="log the results to the evaluation's MLflow run")
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="the interpreter that has lm-eval (default: this one)"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run lm-eval's tasks on a policy; needs the extra lm-eval."""
    from pipelines.base.repository import Repository
    from pipelines.results.lm_eval import Request
    from pipelines.results.lm_eval import lm_eval as evaluate

    request = Request(
        policy=policy,
        tasks=tasks,
        include_path=include_path,
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        device=device,
        chat=chat,
        mlflow=mlflow,
        python=python,
    )
    print(evaluate(Repository.find(), request, as_json=as_json))
