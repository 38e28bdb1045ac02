"""Brings the files of this clone to the one on a host, and the results of a run back.

Both ways go through git: objects that the other side has are not sent again. There, HEAD is
detached at the commit checked out here, with the same uncommitted changes on it, so that a job's
provenance reads as if it had been submitted here. The files are changed with the clone's lock in
hand, under which pipelines run, and by git, which refuses where they are not what was looked at.
"""

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from pipelines.base.errors import LockstepError
from pipelines.host.reconcile import after_a_run, reconcile
from pipelines.host.ssh import Connection, fail
from pipelines.host.trees import (
    AUTHOR,
    BASE,
    LARGE,
    OWN_INDEX,
    THERE,
    UNDER_WAY,
    WHOLE,
    commit_tree,
    git,
    is_known,
    large_files,
    snapshot,
    snapshot_script,
    tree_of,
    write_here,
    write_tree,
)

LOCK_WAIT_S = 2
"""For a command that holds the clone's lock for a moment, such as `lockstep record`."""
_BUSY, _CHANGED = 75, 76
_SNAPSHOT = snapshot_script(OWN_INDEX, "index")
_IGNORE = (
    'ignored="$(git rev-parse --git-path info/exclude)"; mkdir -p "$(dirname "$ignored")"; '
    'grep -qsx /.venv "$ignored" || printf "%s\\n" "" /.lockstep /.venv >>"$ignored"'
)
"""Also in a clone that has no .gitignore yet."""
_KEEP_INDEX = f'mv -f "$index" "$git/{OWN_INDEX}"; unset GIT_INDEX_FILE'
_TOO_LARGE = (
    f"untracked, and larger than {LARGE // 10**6} MB: all files go through git. Have git ignore it "
    "(.gitignore, .git/info/exclude), or remove it"
)
_LOOK_FOR_LARGE = (
    "large=$(git ls-files -o --exclude-standard -z | sed -z 's|^|./|' | "
    f"xargs -0 -r sh -c 'find \"$@\" -prune -type f -size +{LARGE}c' sh); "
    f'[ -z "$large" ] || {{ printf "%s\\n" "lockstep: there:" "$large" {shlex.quote(_TOO_LARGE)} '
    ">&2; exit 2; }"
)
GITLINK = "160000"
MOST_NAMES = 8


@dataclass(frozen=True)
class Seen:
    """The clone there; a commit is empty where there is none."""

    head: str
    base: str
    under_way: str
    there: str
    """The files as they lie there."""
    tree: str


def send(connection: Connection, root: Path, say: Callable[[str], None]) -> str:
    """Have the clone there hold what lies here; refuse where somebody changed something there.

    The commit of these files.
    """
    if large := large_files(root):
        raise LockstepError(f"{_names(large)}: {_TOO_LARGE}")
    head = git(root, "rev-parse", "--verify", "HEAD^{commit}").decode().strip()
    seen = look(connection)
    if not seen.base:
        _check_head(connection, root, seen)
    _fetch(connection, root, seen)
    # Of a commit that a command has brought, from whichever clone, this one has now heard.
    _check_head(connection, root, seen)
    here, there = tree_of(root, snapshot(root)), tree_of(root, seen.tree)
    base = tree_of(root, seen.base or seen.head)
    found = reconcile(here.files, there.files, base.files, tree_of(root, seen.under_way).files)
    if found.conflicts:
        last = BASE if seen.base else "HEAD"
        raise _conflict(connection, found.conflicts, last)
    if nested := [path for path, (mode, _) in here.files.items() if mode == GITLINK]:
        say(f"repositories within this one are not sent: {_names(nested)}")
    if found.only_there:
        say(f"only there, and left as they are: {_names(found.only_there)}")
    write_here(root, found.bring)
    if found.bring:
        say(f"brought from there: {_names(found.bring)}")
    sent = commit_tree(root, write_tree(root, found.sent), [head])
    whole = commit_tree(root, write_tree(root, found.whole), [sent])
    if (seen.head, seen.base, seen.tree) == (head, sent, tree_of(root, whole).name):
        return sent
    paths = there.files.keys() | found.whole.keys()
    differ = sorted(path for path in paths if there.files.get(path) != found.whole.get(path))
    if differ:
        say(f"sending {_names(differ)}")
    _push(connection, root, {sent: UNDER_WAY, whole: WHOLE})
    _check_out(connection, seen, whole, sent, head, differ)
    return sent


def bring_back(connection: Connection, root: Path, say: Callable[[str], None]) -> None:
    """Have the results that are newer there here, too."""
    seen = look(connection)
    _fetch(connection, root, seen)
    base, there = tree_of(root, seen.base), tree_of(root, seen.tree)
    found, settled = after_a_run(tree_of(root, snapshot(root)).files, there.files, base.files)
    write_here(root, found.bring)
    if found.bring:
        say(f"brought from there: {_names(found.bring)}")
    if found.conflicts:
        say(
            f"changed here meanwhile, and left as they are: {_names(found.conflicts)}; "
            f"`git show {THERE}:PATH` has what the run wrote"
        )
    tree = write_tree(root, settled)
    if tree != base.name:
        _push(connection, root, {commit_tree(root, tree, [seen.base]): BASE})


def look(connection: Connection) -> Seen:
    """The state of the clone there."""
    name = connection.host.name
    begin = f"`{connection.host.by_hand('git init -q .')}`"
    author = " ".join(f"{key}={shlex.quote(value)}" for key, value in AUTHOR.items())
    script = connection.in_folder(
        f"command -v git >/dev/null || {fail(f'there is no git on {connection.host.address}')}; "
        '[ "$(git rev-parse --show-toplevel)" = "$(pwd -P)" ] || '
        f"{fail(f'{name} is no clone: make it one with {begin}')}; "
        "head=$(git rev-parse -q --verify HEAD^{commit}); "
        f"base=$(git rev-parse -q --verify {BASE}); "
        f"under_way=$(git rev-parse -q --verify {UNDER_WAY}); "
        f"{_IGNORE}; {_LOOK_FOR_LARGE}; {_SNAPSHOT}; {_KEEP_INDEX}; last=${{base:-$head}}; "
        f"there=$({author} git commit-tree $tree ${{last:+-p $last}} -m 'files there' </dev/null) "
        f"&& git update-ref {THERE} $there || exit 2; "
        """printf '%s\\n' "head $head" "base $base" "under_way $under_way" "there $there" """
        '"tree $tree"'
    )
    lines = (line.partition(" ") for line in connection.read(script).splitlines())
    return Seen(**{key: value for key, _, value in lines})


def _check_head(connection: Connection, root: Path, seen: Seen) -> None:
    """A commit that only the clone there has would be left without a name."""
    if seen.head and not is_known(root, seen.head):
        raise LockstepError(
            f"{connection.host.name} is at commit {seen.head[:12]}, which this clone does not "
            "have: `git fetch` it, or check out one there that both have"
        )


def _check_out(
    connection: Connection, seen: Seen, whole: str, sent: str, head: str, differ: list[str]
) -> None:
    """Change the files there from what was seen to these."""
    settle = (
        f"git update-ref {BASE} {sent} && git update-ref -d {UNDER_WAY} && "
        f"git update-ref --no-deref HEAD {head} && "
        "git read-tree HEAD && { git update-index -q --refresh || :; }"
    )
    # A run that was started takes the clone's lock a moment later; it holds its own all along.
    runs = (
        "for run in .lockstep/host/*/alive; do "
        f'[ ! -e "$run" ] || flock -s -w {LOCK_WAIT_S} -E {_BUSY} "$run" true || exit {_BUSY}; done'
    )
    change = (
        f"{runs}; {_in_the_way(seen.tree, whole)}; "
        f'{_SNAPSHOT}; [ "$tree" = {seen.tree} ] || exit {_CHANGED}; '
        f"git read-tree -m -u {seen.tree} {whole} || exit 2; {_KEEP_INDEX}; {settle}"
    )
    busy = (
        f"a pipeline runs in {connection.host.name}, and would see these change under it: "
        f"{_names(differ)}. `lockstep status` shows it, `lockstep cancel` ends it (both with "
        "--host); with the files as they were, `lockstep run` follows it"
    )
    changed = f"somebody is changing files in {connection.host.name}: rerun the command"
    locked = (
        f"mkdir -p .lockstep/host && flock -w {LOCK_WAIT_S} -E {_BUSY} .lockstep/host/lock "
        f"flock -w {LOCK_WAIT_S} -E {_BUSY} .lockstep/run.lock "
        f"sh -c {shlex.quote(change)}; status=$?; "
        f"[ $status != {_BUSY} ] || {fail(busy)}; [ $status != {_CHANGED} ] || {fail(changed)}; "
        "exit $status"
    )
    connection.read(connection.in_folder(locked if differ else settle))


def _in_the_way(seen: str, whole: str) -> str:
    """Commands of sh that refuse to replace files that git ignores there, as it would itself."""
    list_them = 'for path; do { [ -e "$path" ] || [ -L "$path" ]; } && echo "$path"; done; :'
    added = f"git diff-tree -r -z --name-only --diff-filter=A {seen} {whole}"
    ignored = "lockstep: files there, which git ignores there, would be replaced: move them away:"
    return (
        f"lie=$({added} | xargs -0 -r sh -c {shlex.quote(list_them)} sh); "
        f'[ -z "$lie" ] || {{ printf "%s\\n" {shlex.quote(ignored)} "$lie" >&2; exit 2; }}'
    )


def _conflict(connection: Connection, paths: Iterable[str], last: str) -> LockstepError:
    names = " ".join(map(shlex.quote, paths))
    return LockstepError(
        f"{connection.host.name}: somebody changed {names} there, which the files here would "
        f"overwrite. To have them here: git checkout {THERE} -- {names}. To discard them: "
        f"{connection.host.by_hand(f'git checkout {last} -- {names}')} (rm what is new there). "
        "Then rerun the command"
    )


def _fetch(connection: Connection, root: Path, seen: Seen) -> None:
    """What is there; objects that this clone has are not asked for."""
    wanted = {f"+{THERE}": THERE}
    if seen.under_way:
        wanted[f"+{UNDER_WAY}"] = UNDER_WAY
    if not all(is_known(root, name) for name in (seen.there, seen.under_way) if name):
        refs = [f"{theirs}:{ours}" for theirs, ours in wanted.items()]
        options = ["--quiet", "--no-tags", "--no-recurse-submodules", "--no-auto-gc"]
        words = ["fetch", *options, connection.host.url, *refs]
        git(root, *words, variables=connection.for_git)
    git(root, "update-ref", THERE, seen.there)


def _push(connection: Connection, root: Path, refs: dict[str, str]) -> None:
    names = [f"{commit}:{name}" for commit, name in refs.items()]
    options = ["--quiet", "--force", "--no-verify", "--no-signed", "--recurse-submodules=no"]
    words = ["push", *options, connection.host.url, *names]
    git(root, *words, variables=connection.for_git)


def _names(paths: Iterable[str]) -> str:
    """Some of them, in a line."""
    listed = sorted(paths)
    more = f" and {len(listed) - MOST_NAMES} more" if len(listed) > MOST_NAMES else ""
    return ", ".join(map(shlex.quote, listed[:MOST_NAMES])) + more
