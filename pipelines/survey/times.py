"""Time limits, restarts, and what preemption does."""

import math

from pipelines.config.profiles import EARLIEST_SIGNAL_S
from pipelines.survey.draft import Setting
from pipelines.survey.offers import Offer, preempt_mode
from pipelines.survey.values import Cluster
from pipelines.survey.words import span

MINUTES = 240
"""Where the site has no better idea: short jobs start sooner, and a stage goes on in the next."""
LEAST_DEFAULT, MOST_DEFAULT = 30, 1440
"""A site's default time limit within these is taken; others are for single commands, or none."""
STAGE_MINUTES = 16 * 60
"""That restarts should last for without anybody looking after a stage."""
SIGNAL_S = 90
REQUEUES, REQUEUES_PREEMPTED, MOST_REQUEUES = 3, 10, 50


def times(cluster: Cluster, best: Offer, minutes: int | None) -> list[Setting]:
    limit = time_limit(best, minutes)
    settings = [limit]
    signal = signal_lead(limit.number)
    if signal < SIGNAL_S:
        why = "before the time limit, to save; Slurm may send it a minute early"
        settings.append(Setting("signal_lead_seconds", signal, why))
    if not cluster.settings.requeues:
        why = "this cluster puts no job back into the queue (JobRequeue=0): a restart is a new job"
        settings.append(Setting("requeue", False, why))
    return [*settings, _requeues(best, limit.number)]


def time_limit(best: Offer, minutes: int | None) -> Setting:
    """The user's, else the partition's default, else four hours; never more than is allowed."""
    most, default, name = best.max_minutes, best.partition.default_minutes, best.partition.name
    at_most = f"at most {span(most)}" if most else "it has no limit"
    if minutes:
        return Setting("time_minutes", minutes, f"as you asked; {name}: {at_most}")
    if default and LEAST_DEFAULT <= default <= min(MOST_DEFAULT, most or MOST_DEFAULT):
        why = f"the default time limit of partition {name} is {span(default)}; {at_most}"
        return Setting("time_minutes", default, why)
    if most and most <= MINUTES:
        by = "partition" if most == best.partition.max_minutes else "accounting, in partition"
        return Setting("time_minutes", most, f"the time limit of {by} {name}")
    why = f"short jobs start sooner, and stages resume; {name}: {at_most}"
    return Setting("time_minutes", MINUTES, why)


def signal_lead(minutes: int) -> int:
    """Half of what is left of a short job, at most the usual."""
    return min(SIGNAL_S, (60 * minutes - EARLIEST_SIGNAL_S) // 2)


def _requeues(best: Offer, minutes: int) -> Setting:
    for_time = min(math.ceil(STAGE_MINUTES / minutes) - 1, MOST_REQUEUES)
    count = max(REQUEUES, for_time)
    whole = span((count + 1) * minutes)
    why = f"a stage goes on after its time limit: {count + 1} x {span(minutes)} are {whole}"
    if best.preemptor:
        count, why = max(count, REQUEUES_PREEMPTED), f"jobs of {best.preemptor} preempt yours"
    return Setting("requeues", count, why)


def of_preemption(cluster: Cluster, best: Offer) -> str:
    """What happens to a job when one that counts for more wants its place."""
    partition, settings = best.partition.name, cluster.settings
    if best.preemptor is None:
        if settings.preempt_type == "preempt/qos" and not best.rights.qos:
            return "Preemption: by QOS, and accounting does not say which is yours."
        return f"Preemption: no job preempts yours in {partition} ({settings.preempt_type})."
    mode, grace = preempt_mode(cluster, best), best.partition.grace_seconds
    does = {
        "REQUEUE": "puts a job back into the queue, where it goes on from its last checkpoint",
        "CANCEL": "cancels a job, and lockstep goes on in a new one",
        "SUSPEND": "suspends a job, which goes on later on the same nodes",
        "OFF": "is off after all",
    }.get(mode, f"is {mode}")
    text = f"Preemption by {best.preemptor} {does}."
    if mode not in ("REQUEUE", "CANCEL"):
        return text
    if grace and settings.warns_preempted:
        return f"{text} A job is warned {grace} s before, and saves if its step is shorter."
    if grace:
        return f"{text} A job has {grace} s to end, but no warning: see checkpoint_seconds."
    return f"{text} It comes without warning: what is lost is set by checkpoint_seconds."
