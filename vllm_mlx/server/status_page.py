"""The status page at `/` and its files, all from this package. Knows nothing of the data that it displays."""

from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from .. import __version__

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
ABOUT = {"name": "vllm-mlx", "version": __version__, "api": "/openapi.json", "models": "/v1/models", "page": "/"}


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """The content and the media type of each file, by the path of its URL.

    These paths need no API key: the page itself asks for one and displays no data without it.
    """
    found = {}
    for file in (files("vllm_mlx") / "server" / "page").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in TYPES:
            found["/" if file.name == "index.html" else f"/page/{file.name}"] = file.read_bytes(), TYPES[suffix]
    return found


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(http: Request) -> Response:
        """Send the page to browsers, and a short JSON object to programs."""
        if "text/html" in http.headers.get("accept", ""):
            return _file("/", vary="accept")
        return JSONResponse(ABOUT, headers={"vary": "accept"})

    for path in page_files().keys() - {"/"}:
        router.add_api_route(path, _endpoint(path), methods=["GET", "HEAD"])
    return router


def _endpoint(path: str) -> Callable[[], Awaitable[Response]]:
    async def part() -> Response:
        return _file(path)

    return part


def _file(path: str, **headers: str) -> Response:
    content, media_type = page_files()[path]
    return Response(content, headers={**HEADERS, **headers}, media_type=media_type)
