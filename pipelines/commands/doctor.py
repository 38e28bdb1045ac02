from pipelines.commands.options import Json, show


def doctor(as_json: Json = False) -> int:
    """Check the environment and say what to fix."""
    from pipelines.base.repository import Repository
    from pipelines.doctor.checks import examine, render

    findings = examine(Repository.find())
    show([finding.as_json() for finding in findings], render(findings), as_json=as_json)
    return 0 if all(finding.fine for finding in findings) else 1
