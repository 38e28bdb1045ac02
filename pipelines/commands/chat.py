from typing import Annotated

import typer

from pipelines.commands.options import Json


def chat(
    policies: Annotated[
        list[str],
        typer.Argument(
            metavar="POLICY [OTHER]",
            help="sft, iter_002, ...; of another commit, REV:iter_002; two are asked the same",
        ),
    ],
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="the system prompt")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0: the likeliest tokens (default: rollout.temperature)"),
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="(default: rollout.top_p)")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="(default: rollout.max_new_tokens)")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="the same seed gives the same answers (default: the params' seed)"),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="ask this alone, and end")
    ] = None,
    as_json: Json = False,
) -> None:
    """Chat with a finished policy, or with two side by side."""
    from contextlib import ExitStack, closing

    from pipelines.base.errors import LockstepError
    from pipelines.base.repository import Repository
    from pipelines.chat.dialogue import Options
    from pipelines.chat.engine import Engine
    from pipelines.chat.policies import find_policy
    from pipelines.chat.terminal import Conversation, ask_once, one_shot_json
    from pipelines.chat.terminal import chat as talk
    from pipelines.commands.options import show
    from pipelines.config.params import load_params

    if len(policies) > 2:
        raise LockstepError(f"{len(policies)} policies are named: chat with one or two")
    if as_json and prompt is None:
        raise LockstepError("--json is for one answer: add --prompt TEXT")
    repository = Repository.find()
    params = load_params(repository.root)
    options = Options.of_rollout(params).changed(
        seed=seed, temperature=temperature, top_p=top_p, max_new_tokens=max_tokens
    )
    found = [find_policy(repository, name) for name in policies]
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(Engine(policy, params))) for policy in found]
        conversation = Conversation(engines, options, system)
        if prompt is None:
            print("/help lists commands; Ctrl-D ends the chat")
            talk(conversation)
            return
        answers = ask_once(conversation, prompt, quiet=as_json)
        if as_json:
            show(one_shot_json(conversation, prompt, answers), "", as_json=True)
