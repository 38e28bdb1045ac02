"""The application of `lockstep ui`: the pages, what is static in them, and how errors reach them.

A page is a line of `PAGES`: its JSON comes from the router under `/api/NAME`, its HTML and script
are `static/NAME.html` and `static/NAME.js`. The first page is also the one at `/`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.types import Scope

from pipelines.base.errors import LockstepError
from pipelines.base.owners import explain
from pipelines.ui import (
    annotate_api,
    chat_api,
    compare_api,
    data_api,
    lineage_api,
    run_api,
    samples_api,
)
from pipelines.ui.clone import Clone
from pipelines.ui.guard import Guard, reading_cookie

STATIC = Path(__file__).parent / "static"
FRESH = {"cache-control": "no-cache"}
"""Ask again whether it has changed: a newer version of the project has newer pages."""


@dataclass(frozen=True)
class Page:
    name: str
    title: str
    router: Callable[[Clone], APIRouter]


PAGES = (
    Page("run", "Run", run_api.router),
    Page("samples", "Samples", samples_api.router),
    Page("compare", "Compare", compare_api.router),
    Page("lineage", "Lineage", lineage_api.router),
    Page("data", "Data", data_api.router),
    Page("chat", "Chat", chat_api.router),
    Page("annotate", "Annotate", annotate_api.router),
)
"""In the order of the navigation: Run, Samples, Compare, Lineage, Data, Chat, Annotate."""


def create_app(clone: Clone, pages: tuple[Page, ...] = PAGES) -> FastAPI:
    """All pages of a clone, behind the guard."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, token=clone.token)
    app.add_exception_handler(LockstepError, _lockstep_error)
    app.add_exception_handler(OSError, _os_error)
    app.add_exception_handler(RequestValidationError, _bad_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.mount("/static", _Static(directory=STATIC))
    for page in pages:
        app.include_router(page.router(clone), prefix=f"/api/{page.name}")

    @app.get("/api/pages")
    def list_pages() -> dict[str, Any]:
        """What the navigation shows."""
        shown = [{"name": page.name, "title": page.title} for page in pages]
        return {"clone": clone.root.name, "root": str(clone.root), "pages": shown}

    @app.post("/api/reader")
    def let_read(request: Request) -> Response:
        """The cookie for all tabs of this browser; whoever asks has the token."""
        name, key = reading_cookie(request.headers["host"], clone.token)
        answer = Response(status_code=204)
        answer.set_cookie(name, key, httponly=True, samesite="strict")
        return answer

    @app.get("/")
    def first_page() -> FileResponse:
        return _html(pages[0].name)

    @app.get("/{name}")
    def named_page(name: str) -> FileResponse:
        if name not in {each.name for each in pages}:
            raise HTTPException(404, f"there is no page {name!r} here")
        return _html(name)

    return app


class _Static(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Any:
        response = await super().get_response(path, scope)
        response.headers.update(FRESH)
        return response


def _html(name: str) -> FileResponse:
    return FileResponse(STATIC / f"{name}.html", headers=FRESH)


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)


def _lockstep_error(_request: Request, error: Exception) -> JSONResponse:
    return _error(400, str(error))


def _os_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, OSError)
    return _error(500, explain(error))


def _bad_request(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    wrong = [f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}" for each in error.errors()]
    return _error(400, "; ".join(wrong))


def _http_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, str(error.detail))
