def code() -> None:
    """Write down which code each stage runs (what dvc.yaml calls: `dvc repro code`)."""
    from pipelines.base.repository import Repository
    from pipelines.identity.map_files import write_maps
    from stages.contracts.catalog import STAGES

    write_maps(Repository.find(), [stage.module for stage in STAGES.values()])
