"""`lockstep doctor`."""

import json

from pipelines.commands.options import Json


def doctor(as_json: Json = False) -> int:
    """Check the environment and say what to fix."""
    from pipelines.base.repository import Repository
    from pipelines.doctor.checks import examine, render

    findings = examine(Repository.find())
    if as_json:
        print(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        print(render(findings))
    return 0 if all(finding.fine for finding in findings) else 1
