"""The status page at `/` and its files, all from this package. Knows nothing of the data that it displays."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ... import __version__

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
ABOUT = {"name": "vllm-mlx", "version": __version__, "api": "/openapi.json", "models": "/v1/models", "page": "/"}


@dataclass(frozen=True, slots=True)
class PageFile:
    path: str  # the path of its URL
    media_type: str
    content: bytes


def page_files() -> Iterator[PageFile]:
    for file in (files("vllm_mlx") / "server" / "page").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in TYPES:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            yield PageFile(path, TYPES[suffix], file.read_bytes())


def page_paths() -> frozenset[str]:
    """The paths that need no API key: the page itself asks for one and displays no data without it."""
    return frozenset(file.path for file in page_files())


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    parts = {file.path: file for file in page_files()}

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(http: Request) -> Response:
        """Send the page to browsers, and a short JSON object to programs."""
        if "text/html" in http.headers.get("accept", ""):
            return _sent(parts["/"], {"vary": "accept"})
        return JSONResponse(ABOUT, headers={"vary": "accept"})

    for path in parts.keys() - {"/"}:
        router.add_api_route(path, _route(parts[path]), methods=["GET", "HEAD"])
    return router


def _route(file: PageFile) -> Callable[[], Awaitable[Response]]:
    async def part() -> Response:
        return _sent(file, {})

    return part


def _sent(file: PageFile, headers: dict[str, str]) -> Response:
    return Response(file.content, headers={**HEADERS, **headers}, media_type=file.media_type)
