"""The words after `lockstep session`. Imports little: every command's parser needs it."""

import argparse
from collections.abc import Callable

DEFAULT_NAME = "main"
DEFAULT_STAGES = "rollout,score,policy_update"
DEFAULT_IDLE_MINUTES = 30.0


Add = Callable[[argparse.ArgumentParser], None]


def add_options(parser: argparse.ArgumentParser, add_profile: Add, add_json: Add) -> None:
    what = parser.add_subparsers(required=True, metavar="up|down|status", dest="what")
    up = what.add_parser("up", help="start a session", description="Start a session.")
    add_profile(up)
    up.add_argument("--name", default=DEFAULT_NAME, help=f"its name (default: {DEFAULT_NAME})")
    up.add_argument(
        "--stages",
        default=DEFAULT_STAGES,
        metavar="A,B",
        help=f"stages that it runs (default: {DEFAULT_STAGES})",
    )
    up.add_argument(
        "--idle-minutes",
        type=float,
        default=DEFAULT_IDLE_MINUTES,
        metavar="M",
        help=f"it ends after so long without a stage (default: {DEFAULT_IDLE_MINUTES:g})",
    )
    up.add_argument(
        "--minutes", type=int, metavar="M", help="it ends after so long (default: the profile's)"
    )
    up.add_argument("--dry-run", action="store_true", help="print the exact job script instead")
    add_json(up)
    down = what.add_parser("down", help="end sessions", description="End sessions.")
    down.add_argument("names", nargs="*", metavar="NAME", help="which (default: all)")
    status = what.add_parser("status", help="how sessions fare", description="How sessions fare.")
    add_json(status)
