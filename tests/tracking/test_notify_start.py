"""When a notifier runs, and what a profile may say."""

import json
from typing import Any

import pytest

from pipelines.base.errors import LockstepError
from pipelines.config.profiles import load_profile
from pipelines.doctor.checks import _notify
from pipelines.tracking import notify
from pipelines.tracking.shipper import start_shipper
from tests.tracking.fake_clone import FakeClone
from tests.tracking.notify_tools import SECRET, Hook, configure, fail, tell
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("short_waits")


def test_two_commands_at_once_tell_it_once(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    fail(clone, "sft")
    start_shipper(clone.repository)
    start_shipper(clone.repository)
    tell(clone)
    until(lambda: hook.got, "it is told")
    tell(clone)
    assert hook.events == [("sft", "failed")]


def test_a_damaged_file_of_the_notifier_ends_no_command(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    clone.repository.home.mkdir(exist_ok=True)
    (clone.repository.home / "notify.json").write_text("{")
    start_shipper(clone.repository)
    assert "address" in json.loads((clone.repository.home / "notify.json").read_text())


def test_doctor_names_a_variable_that_is_not_set(clone: FakeClone, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCKSTEP_PROFILE", "laptop")
    configure(clone, webhook="$MY_WEBHOOK")
    [check] = _notify(clone.repository)
    assert (check.fine, check.detail) == (False, "MY_WEBHOOK not set")
    monkeypatch.setenv("MY_WEBHOOK", f"http://127.0.0.1/{SECRET}")
    [check] = _notify(clone.repository)
    assert (check.fine, check.detail) == (True, "failed, warning: webhook")
    configure(clone, on=["failed"])
    [check] = _notify(clone.repository)
    assert "neither webhook, command nor email" in check.detail


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"webhok": "http://x"}, "did you mean `notify.webhook`?"),
        ({"webhook": "slack"}, "notify.webhook"),
        ({"webhook": "$"}, "notify.webhook"),
        ({"webhook": "$TEAM-WEBHOOK"}, "notify.webhook"),
        ({"on": ["fail"]}, "notify.on"),
        (
            {"email": {"host": "h", "sender": "a", "to": ["b"], "password": "x"}},
            "a password does not belong in a profile",
        ),
    ],
)
def test_what_is_wrong_in_a_profile_is_said_by_its_key(
    clone: FakeClone, values: dict[str, Any], expected: str
):
    configure(clone, **values)
    with pytest.raises(LockstepError, match=r"laptop\.yaml") as error:
        load_profile(clone.root, "laptop")
    assert expected in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "notify : {{webhook: '{url}'}}",
        "'notify': {{webhook: '{url}'}}",
        "notify:\n  webhook: '{url}'",
        "? notify\n: webhook: '{url}'",
    ],
)
def test_notify_is_found_however_yaml_spells_it(clone: FakeClone, hook: Hook, text: str):
    configure(clone)
    profile = clone.root / "slurm_profiles/laptop.yaml"
    profile.write_text(f"executor: local\n{text.format(url=hook.url)}\n")
    fail(clone, "sft")
    assert notify.is_configured(clone.repository)
    tell(clone)
    assert hook.events == [("sft", "failed")]


def test_without_notify_nothing_is_started(clone: FakeClone):
    profile = clone.root / "slurm_profiles/laptop.yaml"
    profile.parent.mkdir()
    profile.write_text("executor: local\n")
    start_shipper(clone.repository)
    assert not (clone.repository.home / "notify.json").exists()
    assert not clone.processes_of("pipelines.tracking.notify")
    profile.write_text("executor: local\n# notify: {}\n")
    with fail(clone, "sft").lease():  # work that a notifier would stay for
        tell(clone)
