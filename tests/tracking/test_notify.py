"""Somebody is told when a stage fails, warns or ends: of what, when, and how often."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.tracking import notify, notify_due
from pipelines.tracking.cursor import end_invocation
from pipelines.tracking.notified import Notified
from pipelines.tracking.notify_due import Scan
from pipelines.tracking.shipper import problem
from tests.ports import free_port
from tests.tracking.fake_clone import FakeClone
from tests.tracking.notify_tools import (
    Hook,
    configure,
    end_retryably,
    fail,
    look,
    start_earlier,
    tell,
)

pytestmark = pytest.mark.usefixtures("short_waits")


def test_a_webhook_gets_failures_once_with_what_there_is_to_know(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    fail(clone, "sft")
    tell(clone)
    [message] = hook.got
    assert message["text"] == "sft failed: RuntimeError: out of memory (clone)"
    assert message["error"] == "RuntimeError: out of memory\nmore"
    expected = {"event": "failed", "stage": "sft", "profile": "laptop", "host": "node-1"}
    assert {key: message[key] for key in expected} == expected
    clone.run("prepare")
    tell(clone)
    assert hook.events == [("sft", "failed")]


def test_a_stage_that_fails_again_is_told_again_and_its_end_if_wanted(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url, on=["failed", "ended"])
    entry = fail(clone, "sft")
    tell(clone)
    clone.start(entry)
    clone.end(entry, "failed", error="again")
    tell(clone)
    clone.start(entry)
    clone.finish(entry)
    tell(clone)
    tell(clone)
    assert hook.events == [("sft", "failed"), ("sft", "failed"), ("sft", "ended")]


def test_a_failure_that_a_driver_may_still_mend_is_not_told(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    entry = fail(clone, "sft")
    with entry.lease():
        assert not list(Scan(clone.repository).owing())
    tell(clone)
    assert hook.events == [("sft", "failed")]


@pytest.mark.parametrize("dies", [True, False])
def test_a_failure_that_may_be_retried_is_told_when_nobody_does(
    clone: FakeClone, hook: Hook, monkeypatch: pytest.MonkeyPatch, dies: bool
):
    configure(clone, webhook=hook.url)
    entry = clone.begin("sft")
    end_retryably(clone, entry, dies)
    look(clone)
    clone.start(entry)
    end_retryably(clone, entry, dies)
    look(clone)
    assert hook.events == [], "a flow may try again"
    monkeypatch.setattr(notify_due, "RETRY_WAIT_S", 0.0)
    tell(clone)
    tell(clone)
    assert [message["attempts"] for message in hook.got] == [2]


def test_a_failure_is_told_at_once_when_its_command_has_ended(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    end_retryably(clone, clone.begin("sft"), dies=True)
    end_invocation(clone.repository, "run")
    look(clone)
    assert hook.events == [("sft", "failed")]


def test_a_failure_in_the_folder_of_an_experiment_does_not_wait_for_a_retry(
    tmp_path: Path, hook: Hook
):
    clone = FakeClone(tmp_path / "repository/.dvc/tmp/exps/one")
    configure(clone, webhook=hook.url)
    end_retryably(clone, clone.begin("sft"), dies=False)
    look(clone)
    assert hook.events == [("sft", "failed")]


def test_what_was_cancelled_by_hand_is_not_told(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url, on=["failed", "ended"])
    clone.end(clone.begin("sft"), "cancelled")
    tell(clone)
    assert hook.got == []


def test_each_kind_of_warning_is_told_once(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    metrics = clone.root / "metrics/evaluations/sft.json"
    metrics.parent.mkdir(parents=True)
    clone.run("evaluate_sft")
    bad = {"accuracy": 0.0, "accuracy_sampled": 0.0, "truncation_rate": 1.0, "num_judged": 9}
    metrics.unlink(missing_ok=True)
    metrics.write_text(json.dumps(bad))
    tell(clone)
    [message] = hook.got
    assert message["event"] == "warning"
    assert len(message["warnings"]) >= 1
    tell(clone)
    assert len(hook.got) == 1


def test_a_warning_that_one_way_cannot_have_holds_up_no_failure(clone: FakeClone, hook: Hook):
    mail = {"host": "127.0.0.1", "port": free_port(), "sender": "a@here", "to": ["b@here"]}
    configure(clone, webhook=hook.url, email=mail)
    entry = clone.entry("evaluate_sft")
    metrics = clone.root / "metrics/evaluations/sft.json"
    metrics.parent.mkdir(parents=True)
    bad = {"accuracy": 0.0, "accuracy_sampled": 0.0, "truncation_rate": 1.0, "num_judged": 9}
    metrics.write_text(json.dumps(bad))
    clone.start(entry)
    clone.end(entry, "failed")
    tell(clone)
    assert hook.events == [("evaluate_sft", "warning"), ("evaluate_sft", "failed")]


def test_what_ended_before_anybody_wanted_to_know_is_not_told(clone: FakeClone, hook: Hook):
    entry = fail(clone, "sft")
    attempt = entry.attempts()[-1]
    attempt.write(replace(attempt.result, ended=time.time() - 500))
    configure(clone, webhook=hook.url)
    tell(clone)
    assert hook.got == []


def test_a_job_that_died_is_told_whenever_it_had_started(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch, hook: Hook
):
    monkeypatch.setattr(notify_due, "RETRY_WAIT_S", 0.0)
    entry = clone.begin("sft")
    start_earlier(entry, hours=2)
    configure(clone, webhook=f"http://127.0.0.1:{free_port()}/")
    assert notify.Notifier(clone.repository).is_busy(), "it lives when somebody first asks"
    clone.die(entry)
    tell(clone)
    assert "webhook: " in (problem(clone.repository) or "")
    configure(clone, webhook=hook.url)
    tell(clone)
    assert hook.events == [("sft", "failed")]
    assert time.time() - hook.got[0]["time"] < 60


def test_the_next_failure_is_told_by_every_way_though_one_still_lacks_the_last(
    clone: FakeClone, hook: Hook
):
    mail = {"host": "127.0.0.1", "port": free_port(), "sender": "a@here", "to": ["b@here"]}
    configure(clone, webhook=hook.url, email=mail)
    entry = fail(clone, "sft")
    tell(clone)
    clone.start(entry)
    clone.end(entry, "failed", error="again")
    tell(clone)
    assert [message["attempts"] for message in hook.got] == [1, 2]


def test_a_line_that_is_added_to_a_profile_tells_nothing_of_before(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url, on=["failed"])
    entry = clone.run("sft")
    attempt = entry.attempts()[-1]
    attempt.write(replace(attempt.result, ended=time.time() - 500))
    died = clone.begin("prepare")
    start_earlier(died, hours=2)
    clone.die(died)
    tell(clone)
    configure(clone, webhook=hook.url, on=["failed", "ended"])
    tell(clone)
    assert hook.got == []
    clone.run("evaluate_sft")
    tell(clone)
    assert hook.events == [("evaluate_sft", "ended")]


def test_an_entry_that_cannot_be_read_is_said_and_the_others_are_told(clone: FakeClone, hook: Hook):
    configure(clone, webhook=hook.url)
    (fail(clone, "sft").folder / "notified.json").write_text("{")
    fail(clone, "prepare")
    tell(clone)
    assert hook.events == [("prepare", "failed")]
    assert "notified.json is no JSON" in (problem(clone.repository) or "")


def test_what_is_refused_or_too_late_is_left_and_said(
    clone: FakeClone, monkeypatch: pytest.MonkeyPatch
):
    hook = Hook(status=404)
    configure(clone, webhook=hook.url)
    fail(clone, "sft")
    tell(clone)
    tell(clone)
    hook.server.shutdown()
    assert len(hook.got) == 1
    assert "webhook: status 404" in (problem(clone.repository) or "")
    monkeypatch.setattr(notify, "LATEST_S", -1.0)
    configure(clone, webhook=f"http://127.0.0.1:{free_port()}/")
    entry = fail(clone, "prepare")
    tell(clone)
    assert Notified.of(entry).told == ("failed 1",)
