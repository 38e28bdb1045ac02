"""How many threads the numerical libraries of a job use."""

from pipelines.config.profiles import Resources


def thread_variables(resources: Resources) -> dict[str, str]:
    """The libraries read their number of threads when they are imported."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(resources.cpus_per_task))
