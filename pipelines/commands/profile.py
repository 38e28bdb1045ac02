"""`lockstep profile init`."""

import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.base.repository import Repository
from pipelines.commands.options import Json, only_one, show

if TYPE_CHECKING:
    from pipelines.survey.offers import Offer, Wishes
    from pipelines.survey.values import Cluster

profile = typer.Typer(
    help="Write a profile for the cluster that you are on.",
    subcommand_metavar="init",
    add_completion=False,
    rich_markup_mode=None,
)


@profile.callback()
def _group() -> None:
    """Write a profile for the cluster that you are on."""


@profile.command()
def init(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="slurm_profiles/NAME.yaml (default: the cluster's name)"
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="NAME", help="where to run (default: see the reason)")
    ] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="what to charge")] = None,
    qos: Annotated[str | None, typer.Option(metavar="NAME", help="quality of service")] = None,
    gpus: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="of a stage that trains (default: 1; 0: none)"),
    ] = None,
    time: Annotated[
        int | None, typer.Option(metavar="MINUTES", min=3, help="time limit of a job")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the file if it exists")] = False,
    to_stdout: Annotated[
        bool, typer.Option("--stdout", help="print the profile, write nothing")
    ] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="ask nothing")] = False,
    as_json: Json = False,
) -> int:
    """Look at the Slurm cluster and write a commented profile for it."""
    from pipelines.doctor.checks import render
    from pipelines.doctor.slurm import examine_slurm
    from pipelines.survey.asking import look
    from pipelines.survey.choosing import choose
    from pipelines.survey.offers import Wishes
    from pipelines.survey.writing import destination, head, profile_text, write

    only_one(stdout=to_stdout, json=as_json)
    repository, wishes = Repository.find(), Wishes(partition, account, qos, gpus, time)
    cluster = look()
    title = name or re.sub(r"[^\w.-]+", "-", cluster.settings.cluster.lower()) or "mine"
    path = destination(repository.root, title, force=force or to_stdout)
    may_ask = not (yes or to_stdout or as_json) and sys.stdin.isatty() and sys.stdout.isatty()
    draft = choose(cluster, wishes, _asked(cluster, wishes) if may_ask else None)
    text = profile_text(draft, head(cluster, title))
    if to_stdout:
        print(text, end="")
        return 0
    write(path, text)
    findings = list(examine_slurm(repository, title))
    shown = path.relative_to(repository.root)
    lines = [f"{shown}: {draft.description}"]
    chosen = [each for each in draft.defaults if each.why and not each.is_advice]
    lines += [f"  {each.key} {each.value}: {each.why}" for each in chosen]
    show(
        {"profile": title, "path": str(shown), **draft.as_json()}
        | {"checks": [each.as_json() for each in findings]},
        "\n".join([*lines, render(findings)]),
        as_json=as_json,
    )
    return 0 if all(each.fine for each in findings) else 1


def _asked(cluster: "Cluster", wishes: "Wishes") -> "Offer | None":
    """Which of several equally sensible offers; None where there is no choice."""
    from pipelines.survey.ranking import rank
    from pipelines.survey.remarks import offer_in_words

    ranked = rank(cluster, wishes)
    if len(ranked.equals) < 2:
        return None
    for number, each in enumerate(ranked.equals, 1):
        print(f"  {number}  {offer_in_words(each)}")
    while True:
        try:
            answer = input(f"Which one? Enter takes 1 ({ranked.why}): ").strip() or "1"
        except EOFError:
            return None  # nobody is there to choose
        if answer.isdigit() and 1 <= int(answer) <= len(ranked.equals):
            # The first one has a reason of its own.
            return ranked.equals[int(answer) - 1] if answer != "1" else None
        print(f"a number from 1 to {len(ranked.equals)}, please")
