"""Compares JSON replies with what `/openapi.json` says of them."""

from typing import Any

import httpx
import jsonschema


def documented_reply(client: httpx.Client, path: str) -> Any:
    """GET `path` and return its body, which has every field of its documented schema and no other."""
    document = client.get("/openapi.json").json()
    schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    closed = {name: _closed(component) for name, component in document["components"]["schemas"].items()}
    reply = client.get(path)
    assert reply.status_code == 200, reply.text
    jsonschema.validate(reply.json(), {**schema, "components": {"schemas": closed}})
    return reply.json()


def _closed(component: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has no field but those that it names."""
    return {**component, "additionalProperties": False} if "properties" in component else component
