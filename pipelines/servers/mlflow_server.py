"""`python -m pipelines.servers.mlflow_server ROOT PORT`: MLflow behind the clone's password.

Every request needs the password, the pages' own files included; only /health, which reveals
nothing, answers without. MLflow accepts requests from any page on loopback; here a page of another
server is refused, even in a browser that has the password.
"""

import hmac
import os
import sys
from base64 import b64encode
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from mlflow.server import constants
from mlflow.server.fastapi_app import app as mlflow_app
from mlflow.server.handlers import initialize_backend_stores
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelines.base.repository import Repository
from pipelines.servers.password import USER, password_of
from pipelines.servers.settings import HOST


def guarded(app: ASGIApp, password: str) -> ASGIApp:
    """The application, behind the password."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] == "lifespan" else _refusal(scope, password)
        await (refusal or app)(scope, receive, send)

    return answer


def _refusal(scope: Scope, password: str) -> PlainTextResponse | None:
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        return PlainTextResponse("this page belongs to another server", 403)
    expected = b"Basic " + b64encode(f"{USER}:{password}".encode())
    given = headers.get("authorization", "").encode()
    if hmac.compare_digest(given, expected) or scope["path"] == "/health":
        return None
    return PlainTextResponse(
        "this server requires a password: `lockstep up` prints where it is stored; for MLflow's "
        f"client set MLFLOW_TRACKING_USERNAME={USER} and MLFLOW_TRACKING_PASSWORD",
        401,
        {"WWW-Authenticate": f'Basic realm="{USER}"'},
    )


def main(root: str, port: str) -> None:
    repository = Repository(Path(root))
    store = f"sqlite:///{repository.shared_home / 'mlflow.db'}"
    # A plain folder as artifact root, so that runs can be read with the server stopped.
    artifacts = str(repository.shared_home / "mlartifacts")
    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: store,
        constants.REGISTRY_STORE_URI_ENV_VAR: store,
        constants.ARTIFACT_ROOT_ENV_VAR: artifacts,
        constants.ARTIFACTS_DESTINATION_ENV_VAR: artifacts,
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
    }
    initialize_backend_stores(store, store, artifacts)
    uvicorn.run(guarded(mlflow_app, password_of(repository)), host=HOST, port=int(port))


if __name__ == "__main__":
    main(*sys.argv[1:])
