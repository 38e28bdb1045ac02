"""What a job reads is what its spec says, byte for byte.

The driver hashed the inputs when it fixed the stage's identity, and may have known them by size and
time only. Before a stage begins, whoever is about to read them hashes every byte again: a file that
was changed after submission, or that rotted where it lies, never becomes part of a result.
"""

from collections.abc import Callable, Collection
from pathlib import Path

from pipelines.identity.hashing import Interrupted, hash_bytes
from pipelines.identity.spec import Spec
from stages.context import StageError, Stopped


def check_inputs(
    spec: Spec, root: Path, should_stop: Callable[[], bool], names: Collection[str] | None = None
) -> None:
    """StageError where an input below `root` is not what the spec was made from.

    `names` says which to check, where not all are read from there.
    """
    for name in spec.inputs if names is None else names:
        artifact = spec.inputs[name]
        path = root / artifact.path
        try:
            digest = hash_bytes(path, should_stop)
        except FileNotFoundError as error:
            raise StageError(
                f"{spec.stage}: its input `{name}` at {path} is gone since the stage was "
                f"submitted ({error}): run the same command again"
            ) from error
        except Interrupted as error:
            raise Stopped(f"stopped {error}") from error
        if digest != artifact.hash:
            raise StageError(
                f"{spec.stage}: its input `{name}` at {path} is not what the stage was submitted "
                f"for: its hash is {digest}, and was {artifact.hash}. `lockstep verify` says what "
                "else is damaged, `dvc checkout` brings recorded files back; if it was changed on "
                "purpose, run the same command again"
            )
