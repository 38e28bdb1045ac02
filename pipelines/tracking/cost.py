"""What a stage took, as metrics of its MLflow run: beside its results, under names of their own."""

from pipelines.ledger.costs import Cost

PREFIX = "cost/"


def cost_metrics(cost: Cost) -> dict[str, float]:
    """The same names for every stage; peaks and how busy GPUs were only where that was read."""
    values: dict[str, float | None] = {
        "hours": cost.held.hours,
        "hours_waited": cost.waited.hours,
        "gpu_hours": cost.held.gpu_hours,
        "gpu_hours_lost": cost.lost.gpu_hours,
        "cpu_hours": cost.held.cpu_hours,
        "cpu_hours_lost": cost.lost.cpu_hours,
        "memory_peak_bytes": cost.peak.memory_bytes,
        "gpu_memory_peak_bytes": cost.peak.gpu_memory_bytes,
        "gpu_busy_percent": cost.peak.gpu_busy_percent,
    }
    return {PREFIX + name: float(value) for name, value in values.items() if value is not None}
