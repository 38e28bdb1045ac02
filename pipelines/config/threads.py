"""The number of threads of a job's numerical libraries."""

from pipelines.config.profiles import Resources


def thread_variables(resources: Resources) -> dict[str, str]:
    """Environment variables, because the libraries read them when they are imported."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return dict.fromkeys(names, str(resources.cpus_per_task))
