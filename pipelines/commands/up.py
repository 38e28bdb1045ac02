from typing import Annotated

import typer


def up(
    mlflow_port: Annotated[
        int | None, typer.Option(metavar="N", help="port of the MLflow server")
    ] = None,
    prefect_port: Annotated[
        int | None, typer.Option(metavar="N", help="port of the Prefect server")
    ] = None,
    ui_port: Annotated[
        int | None, typer.Option(metavar="N", help="port of the pages of `lockstep ui`")
    ] = None,
    no_schedules: Annotated[
        bool, typer.Option("--no-schedules", help="deploy the flow with its schedules paused")
    ] = False,
) -> None:
    """Start MLflow, Prefect with a worker, and the pages of `lockstep ui`, on loopback."""
    from pipelines.base.console import Console
    from pipelines.base.repository import Repository
    from pipelines.servers.servers import up as start

    start(
        Repository.find(),
        Console(),
        mlflow_port=mlflow_port,
        prefect_port=prefect_port,
        ui_port=ui_port,
        schedules=not no_schedules,
    )
