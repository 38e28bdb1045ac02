def down() -> None:
    """Stop what `lockstep up` started."""
    from pipelines.base.console import Console
    from pipelines.base.repository import Repository
    from pipelines.servers.servers import down as stop

    stop(Repository.find(), Console())
