"""From a cluster to a profile: what to ask for and why. A pure function, which asks nobody.

A stage that needs a GPU gets one, and of a node's cores and memory the share that goes with it, so
that as many jobs fit on a node as it has GPUs. Nothing is asked for that no node of the chosen type
has, and no limit is passed that Slurm has told.
"""

from pipelines.base.errors import LockstepError
from pipelines.survey import remarks
from pipelines.survey.draft import Draft, Setting
from pipelines.survey.offers import Offer, Wishes, gpus_of
from pipelines.survey.ranking import Ranked, processors, rank
from pipelines.survey.shares import (
    cpus_of,
    gpu_request,
    memory_of,
    memory_of_job,
    on_gpus,
    on_processors,
)
from pipelines.survey.times import SIGNAL_S, signal_lead, times
from pipelines.survey.values import Cluster, least
from pipelines.survey.words import names

PARALLEL = 8
LARGE_GPU_GIB = 64
TRAINING = ("sft", "reward_model", "preference", "policy_update", "online")
WITHOUT_GPU = {"prepare": (4, 16, 30), "report": (1, 4, 10)}
"""Cores, memory in gigabytes and minutes of the stages that load no model."""


def choose(cluster: Cluster, wishes: Wishes, offer: Offer | None = None) -> Draft:
    """The profile for these wishes; `offer` is what the user has picked among equals."""
    _check_names(cluster, wishes)
    ranked = rank(cluster, wishes) if offer is None else Ranked((offer,), "as you chose")
    best = ranked.offers[0]
    _check_numbers(best, wishes)
    resources = on_gpus(cluster, best, wishes.gpus or 1) if best.num_gpus else on_processors(best)
    defaults = [
        Setting("partition", best.partition.name, ranked.why),
        *_rights(cluster, best, wishes),
        *resources,
        *times(cluster, best, wishes.minutes),
        *remarks.local_disk(cluster, best),
        *_tuning(best),
    ]
    return Draft(
        description=_description(best),
        remarks=tuple(remarks.of_cluster(cluster, best, wishes)),
        top=(_parallel(best, wishes),),
        defaults=tuple(defaults),
        stages=_stages(cluster, best, wishes, {each.key: each for each in defaults}),
    )


def _check_names(cluster: Cluster, wishes: Wishes) -> None:
    mine = cluster.accounting.associations if cluster.accounting else ()
    for option, asked, known in (
        ("account", wishes.account, [each.account for each in mine]),
        ("qos", wishes.qos, [name for each in mine for name in each.qos]),
    ):
        if mine and asked and asked not in known:
            raise LockstepError(f"--{option} {asked}: accounting has for you {names(known)}")


def _check_numbers(best: Offer, wishes: Wishes) -> None:
    where, wanted = f"in partition {best.partition.name}", wishes.gpus or 1
    most = max(gpus_of(node, best.kind) for node in best.nodes)
    if best.num_gpus and wanted > most:
        raise LockstepError(f"--gpus {wanted}: a node {where} has at most {most}")
    allowed = best.rights.limits.gpus
    if best.num_gpus and allowed is not None and wanted > allowed:
        raise LockstepError(
            f"--gpus {wanted}: accounting allows you {allowed} at once {where}; choose another "
            "--qos, --account or --partition, or --gpus 0"
        )
    if wishes.minutes and best.max_minutes and wishes.minutes > best.max_minutes:
        raise LockstepError(
            f"--time {wishes.minutes}: jobs {where} take at most {best.max_minutes}"
        )


def _description(best: Offer) -> str:
    if not best.num_gpus:
        return f"Partition {best.partition.name}, without GPUs."
    return f"One {best.kind or 'GPU'} of {best.partition.name} for each stage that can use one."


def _parallel(best: Offer, wishes: Wishes) -> Setting:
    limits = best.rights.limits
    by_gpus = limits.gpus // (wishes.gpus or 1) if limits.gpus and best.num_gpus else None
    most = least((limits.jobs, by_gpus))
    if most is None or most >= PARALLEL:
        return Setting("parallel", PARALLEL, "the most stages that one command submits at once")
    return Setting("parallel", max(1, most), "accounting allows you no more such jobs at once")


def _rights(cluster: Cluster, best: Offer, wishes: Wishes) -> list[Setting]:
    rights, accounting = best.rights, cluster.accounting
    if not rights.account:
        why = "this cluster has no accounting"
        if cluster.settings.has_accounting:
            why = "accounting has none for you" if accounting else "accounting did not answer"
        settings = [Setting("account", "my-team", why, is_advice=True)]
    else:
        why = "as you asked" if wishes.account else f"yours for partition {best.partition.name}"
        if accounting and accounting.default_account == rights.account and not wishes.account:
            why = "your default account"
        others = f"; you also have {names(rights.other_accounts)}" if rights.other_accounts else ""
        settings = [Setting("account", rights.account, why + others)]
    if rights.qos:
        why = "as you asked" if wishes.qos else "yours by this account"
        others = f"; you also have {names(rights.other_qos)}" if rights.other_qos else ""
        settings.append(Setting("qos", rights.qos, why + others))
    return settings


def _tuning(best: Offer) -> list[Setting]:
    if not best.num_gpus:
        return []
    settings = [Setting("device", "cuda")]
    if (best.memory.gib or 0) >= LARGE_GPU_GIB:
        settings.append(Setting("micro_tokens", 16384, "fits a policy of 1B on such a GPU"))
    setup = Setting("setup", "[module load cuda]", "before Python starts", is_advice=True)
    return [*settings, setup]


def _stages(
    cluster: Cluster, best: Offer, wishes: Wishes, defaults: dict[str, Setting]
) -> dict[str, tuple[Setting, ...]]:
    stages: dict[str, tuple[Setting, ...]] = {}
    count = wishes.gpus or 1
    if best.num_gpus and count > 1:
        for stage in TRAINING:
            stages[stage] = tuple(_on_several(cluster, best, count, defaults))
    if best.num_gpus:
        tokens = 16384 if "micro_tokens" in defaults else 8192
        critic = Setting("micro_tokens", tokens // 2, "PPO has a critic beside the policy")
        sampler = Setting("micro_tokens", tokens // 4, "it has a sampler beside the policy")
        share = Setting("generator_memory", 0.4, "of the GPU, for vLLM")
        stages["policy_update"] = (*stages.get("policy_update", ()), critic)
        stages["online"] = (*stages.get("online", ()), sampler, share)
    for stage in WITHOUT_GPU:
        stages[stage] = tuple(_without_gpu(cluster, best, wishes, stage, defaults))
    return stages


def _on_several(
    cluster: Cluster, best: Offer, count: int, defaults: dict[str, Setting]
) -> list[Setting]:
    """A stage that trains on several GPUs of a node, one process each."""
    request = gpu_request(cluster, best, count, "as you asked; a process for each")
    settings = [each for each in request if each.key in ("gpus_per_node", "gres")]
    settings.append(Setting("tasks_per_node", count))
    memory = defaults["memory"]
    if not memory.is_advice:
        text = str(memory.value)
        whole = f"{int(text[:-1]) * count}{text[-1]}"
        settings.append(Setting("memory", whole, f"{count} x {text}"))
    return settings


def _without_gpu(
    cluster: Cluster, best: Offer, wishes: Wishes, stage: str, defaults: dict[str, Setting]
) -> list[Setting]:
    """A stage that loads no model: on nodes without GPUs, where there are any."""
    place = best if not best.num_gpus else processors(cluster, wishes) or best
    settings: list[Setting] = []
    if place.partition.name != best.partition.name:
        settings.append(Setting("partition", place.partition.name, "it needs no GPU"))
        for key in ("account", "qos"):
            mine, usual = getattr(place.rights, key), getattr(best.rights, key)
            if mine != usual:
                settings.append(Setting(key, mine, f"for partition {place.partition.name}"))
    off = {"gpus_per_node": 0, "gres": None, "constraint": None, "device": "cpu"}
    settings += [Setting(key, value) for key, value in off.items() if key in defaults]
    cpus, gigabytes, minutes = WITHOUT_GPU[stage]
    room = max((memory_of(place.partition, n), cpus_of(place.partition, n)) for n in place.nodes)
    cpus, minutes = min(cpus, room[1]), least((minutes, place.max_minutes)) or minutes
    settings.append(Setting("cpus_per_task", cpus))
    if not defaults["memory"].is_advice:
        most = min(gigabytes << 10, room[0])
        memory = memory_of_job(place.partition, most, cpus, "")
        settings.append(Setting("memory", None) if memory.is_advice else memory)
    settings.append(Setting("time_minutes", minutes))
    lead = signal_lead(minutes)
    if lead < defaults.get("signal_lead_seconds", Setting("", SIGNAL_S)).number:
        settings.append(Setting("signal_lead_seconds", lead))
    return settings
