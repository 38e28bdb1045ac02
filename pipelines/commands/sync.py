from pipelines.base.errors import LockstepError


def sync() -> None:
    """Ship what MLflow has not got yet, and wait until it has it."""
    from pipelines.base.repository import Repository
    from pipelines.tracking.rounds import ship_all
    from pipelines.tracking.shipper import problem

    repository = Repository.find()
    left = ship_all(repository)
    if left:
        raise LockstepError(problem(repository) or f"{len(left)} stages are not shipped yet")
    print("MLflow has everything")
