"""Prefect's automation for what `notify` of a profile cannot see: flow runs that no stage ended.

Stages tell of themselves. A flow run whose process is killed, or that fails before its first stage
or between two, has nobody to tell of it, so Prefect starts the deployment `alert` for it, which
sends by the ways of the profile. So no address or password is in Prefect's database. The automation
is there while a profile asks for failures; whoever switches it off in Prefect finds it off.
"""

from typing import Any

from pipelines.base.repository import Repository
from pipelines.config.notify import NotifyOn
from pipelines.servers import prefect_api
from pipelines.servers.prefect_api import Api
from pipelines.tracking.notify_due import wishes

NAME = "lockstep: a flow run that no stage ended"
FLOW = "lockstep"
DEPLOYMENT = "alert"
OF_STAGES = "failed: "
"""How the message of a flow run begins that failed because its stages did."""


def keep_automation(repository: Repository, api: Api) -> bool:
    """Create or renew it if a profile asks for it, else remove it; whether it is there."""
    alerts = [item for item in prefect_api.deployments(api) if item["name"] == DEPLOYMENT]
    is_wanted = any(NotifyOn.FAILED in notify.on for notify in wishes(repository).values())
    known = prefect_api.automations(api, NAME)
    if not (alerts and is_wanted):
        for automation in known:
            prefect_api.delete_automation(api, automation["id"])
        return False
    wanted = _automation(alerts[0]["id"])
    if known:
        enabled = known[0]["enabled"]
        prefect_api.replace_automation(api, known[0]["id"], {**wanted, "enabled": enabled})
    else:
        prefect_api.create_automation(api, wanted)
    return True


def _automation(deployment: str) -> dict[str, Any]:
    of_event = {"__prefect_kind": "jinja", "template": "{{ event.resource.id }}"}
    return {
        "name": NAME,
        "description": "Sends `notify` of the profile. `lockstep up` keeps it as it is.",
        "enabled": True,
        "trigger": {
            "type": "event",
            "posture": "Reactive",
            "expect": ["prefect.flow-run.Failed", "prefect.flow-run.Crashed"],
            "match": {
                "prefect.resource.id": "prefect.flow-run.*",
                "prefect.state-message": f"!{OF_STAGES}*",
            },
            "match_related": {
                "prefect.resource.role": "flow",
                "prefect.resource.name": FLOW,
            },
            "for_each": ["prefect.resource.id"],
            "threshold": 1,
            "within": 0,
        },
        "actions": [
            {
                "type": "run-deployment",
                "source": "selected",
                "deployment_id": deployment,
                "parameters": {"resource": of_event},
            }
        ],
    }
