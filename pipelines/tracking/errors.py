"""Why MLflow, or an OpenLineage endpoint, did not take what was sent."""


class UnreachableError(Exception):
    """It does not answer, or not now: try again later."""


class ArtifactsUnreachableError(UnreachableError):
    """MLflow answers, but not the store of its artifacts."""


class RefusedError(Exception):
    """It does not accept this; sending it again would not help."""


class MissingError(RefusedError):
    """The run does not exist any more."""
