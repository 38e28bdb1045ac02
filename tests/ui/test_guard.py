"""Who may ask the server of the pages, and for what; whatever a clone holds is shown as text."""

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipelines.base.repository import Repository
from pipelines.config.params import load_params
from pipelines.identity.code import code_version
from pipelines.identity.hashing import HashCache
from pipelines.identity.spec import spec_of
from pipelines.ledger.entry import Ledger
from pipelines.ui import serve
from pipelines.ui.clone import open_clone, token_file
from pipelines.ui.guard import HEADERS
from stages.contracts.catalog import bind
from tests.conftest import Clone
from tests.ledger_values import ORIGIN, launch, result, worker
from tests.ui.conftest import at, start_ui, wrong_with
from tests.waiting import TIMEOUT_S, ended, stop

TOKEN = "X-Lockstep-Token"


@pytest.fixture
def served(clone: Clone, open_ui: Callable[..., str]) -> Iterator[tuple[httpx.Client, str]]:
    """A client of a server, and the token."""
    link = open_ui(clone)
    address, token = link.split("/#token=")
    with httpx.Client(base_url=address, timeout=TIMEOUT_S, trust_env=False, verify=False) as client:
        yield client, token


def starts(clone: Clone) -> bool:
    """Whether anything was started or asked to end."""
    home = clone.root / ".lockstep"
    return any((home / name).exists() for name in ("ui/run.log", "run.json", "jobs"))


def test_without_the_token_nothing_changes(served: tuple[httpx.Client, str], clone: Clone) -> None:
    client, token = served
    for headers in ({}, {TOKEN: ""}, {TOKEN: "wrong"}, {TOKEN: token[:-1]}):
        for path in ("/api/run/start", "/api/run/cancel"):
            refused = client.post(path, json={}, headers=headers)
            assert refused.status_code == 403
            assert "`lockstep ui`" in refused.json()["error"]
    assert not starts(clone)
    # The same with the token is heard: there is just nothing to end.
    assert client.post("/api/run/cancel", json={}, headers={TOKEN: token}).status_code == 200


def test_without_the_token_or_its_cookie_nothing_is_read(
    served: tuple[httpx.Client, str],
) -> None:
    client, token = served
    paths = ("/api/pages", "/api/run/stages", "/api/run/events", "/api/nothing")
    for headers in ({}, {TOKEN: "wrong"}, {"Cookie": f"lockstep-{client.base_url.port}={token}"}):
        for path in paths:
            refused = client.get(path, headers=headers)
            assert refused.status_code == 403
            assert "`lockstep ui`" in refused.json()["error"]
    assert client.post("/api/reader", headers={TOKEN: "wrong"}).status_code == 403
    assert client.get("/api/pages").status_code == 403
    given = client.post("/api/reader", headers={TOKEN: token})
    assert given.status_code == 204
    assert token not in given.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict"} <= set(given.headers["set-cookie"].split("; "))
    # The client keeps the cookie, which lets it read and change nothing.
    assert client.get("/api/pages").status_code == 200
    assert client.post("/api/run/cancel", json={}).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "attacker.example"},
        {"Host": "attacker.example:8765"},
        {"Host": "127.0.0.1.attacker.example"},
        {"Host": "attacker.example@127.0.0.1"},
        {"Origin": "http://attacker.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
)
def test_pages_of_others_are_refused_even_with_the_token(
    served: tuple[httpx.Client, str], clone: Clone, headers: dict[str, str]
) -> None:
    client, token = served
    assert client.get("/api/pages", headers={**headers, TOKEN: token}).status_code == 403
    answer = client.post("/api/run/start", json={}, headers={**headers, TOKEN: token})
    assert answer.status_code == 403
    assert not starts(clone)


def test_its_own_pages_are_served_with_what_keeps_them_to_themselves(
    served: tuple[httpx.Client, str],
) -> None:
    client, token = served
    own = {"Origin": str(client.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    own |= {TOKEN: token}
    for path in ("/", "/run", "/static/ui.js", "/api/pages", "/api/nothing"):
        answer = client.get(path, headers=own)
        assert answer.status_code == (404 if path == "/api/nothing" else 200)
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        assert token not in answer.text, "the token is in the link alone"
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/..%2fparams.yaml", "/app.py"):
        assert client.get(path, headers=own).status_code == 404


def test_what_a_user_gets_wrong_is_said_in_words(served: tuple[httpx.Client, str]) -> None:
    client, token = served
    for path, params, named in (
        ("stage", {"stage": "roolout"}, "there is no stage 'roolout' here; there are prepare"),
        ("plan", {"profile": "slrum"}, "did you mean 'slurm'?"),
    ):
        answer = client.get(f"/api/run/{path}", params=params, headers={TOKEN: token})
        assert answer.status_code == 400
        assert named in answer.json()["error"]
    body = {"target": "--detach", "profile": "local"}
    answer = client.post("/api/run/start", json=body, headers={TOKEN: token})
    assert "there is no stage '--detach'" in answer.json()["error"]


def test_the_command_keeps_its_token_and_ends_when_it_is_told(clone: Clone) -> None:
    process, link = start_ui(clone)
    address, token = link.split("/#token=")
    assert stat.S_IMODE(token_file(Repository(clone.root)).stat().st_mode) == 0o600
    assert open_clone(Repository(clone.root)).token == token
    taken = clone.run("lockstep", "ui", "--port", address.rpartition(":")[2], check=False)
    assert taken.returncode == 2
    assert "cannot be used" in taken.stdout
    process.send_signal(2)
    assert "Traceback" not in ended(process)
    assert process.returncode == 0
    again, other = start_ui(clone, port=int(address.rpartition(":")[2]))
    assert other == link
    stop(again)


@pytest.mark.browser
def test_the_browser_is_opened_without_the_token_in_its_command_line(
    clone: Clone, open_ui: Callable[..., str], tabs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    link = open_ui(clone)
    serve.open_browser(Repository(clone.root).home / "ui/open.html", link)
    assert link.partition("token=")[2] not in opened[0]
    page = tabs.open(opened[0])
    page.wait_for_selector(".connection.live")
    assert page.get_by_role("button", name="Plan").is_enabled()
    assert not page.get_by_text("This tab may only look").count()
    file = Path(opened[0].removeprefix("file://"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.browser
def test_a_browser_that_was_not_let_in_is_told_how(
    clone: Clone, open_ui: Callable[..., str], tabs: Any
) -> None:
    tabs.expect("403")
    page = tabs.open(open_ui(clone).split("#")[0])
    page.wait_for_selector(".error:has-text('open the link that `lockstep ui` printed')")


HOSTILE = "<img src=x onerror=\"document.title='ran'\"><script>document.title='ran'</script>"


def write_failed_job(root: Path, text: str) -> None:
    """A failed job of `prepare` as it is now that has this text wherever it may have some."""
    repository = Repository(root)
    bound = bind("prepare", load_params(root))
    hashes = HashCache(repository.home / "hashes.json")
    inputs = {path: hashes.of(root / path) for path in bound.inputs.values()}
    code = code_version(root, bound.stage.module, repository.home)
    entry = Ledger(repository.jobs).find_or_create(spec_of(bound, code, inputs), ORIGIN)
    attempt = entry.new_attempt(launch())
    attempt.write(worker())
    attempt.write(result("failed", error=text))
    (attempt.folder / "job_0_log.out").write_text(text)
    row = {"step": 1, "time": 1.0, "metrics": {text: 1.0}}
    (entry.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")


@pytest.mark.browser
def test_hostile_text_stays_text(clone: Clone, open_ui: Callable[..., str], tabs: Any) -> None:
    write_failed_job(clone.root, HOSTILE)
    page = tabs.open(at(open_ui(clone), "/run?stage=prepare"))
    page.wait_for_selector(".logs pre")
    page.wait_for_selector("figure")
    assert page.locator(".logs pre").inner_text() == HOSTILE
    assert page.locator("figure h3").inner_text() == HOSTILE
    assert HOSTILE in page.locator(".failure").inner_text()
    assert page.locator("main img, main script").count() == 0
    assert "ran" not in page.title()
    assert wrong_with(page) == []
