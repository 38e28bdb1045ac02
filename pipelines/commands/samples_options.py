"""The words after `lockstep samples`. Imports little: every command's parser needs it."""

import argparse

DEFAULT_LIMIT = 10
REFERENCE = "sft"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "policy",
        nargs="?",
        help="sft, iter_001, ...; of another commit, REV:iter_001 (default: the last)",
    )
    which = parser.add_mutually_exclusive_group()
    for name, text in (
        ("wrong", "only answers that are wrong"),
        ("right", "only answers that are right"),
        ("lost", "only where the other policy's reward is higher, the largest loss first"),
        ("won", "only where the other policy's reward is lower, the largest gain first"),
    ):
        which.add_argument(f"--{name}", dest="which", action="store_const", const=name, help=text)
    parser.add_argument("--task", metavar="T", help="only prompts of this task")
    parser.add_argument(
        "--against", metavar="POLICY", help=f"the policy to compare with (default: {REFERENCE})"
    )
    parser.add_argument("--sampled", action="store_true", help="the sampled responses, too")
    parser.add_argument(
        "-n",
        dest="limit",
        type=int,
        default=DEFAULT_LIMIT,
        metavar="N",
        help=f"at most so many prompts; 0: all (default: {DEFAULT_LIMIT})",
    )
