"""`GET /v1/models` and `GET /v1/models/{id}`. To clients, every served name is a model."""

from collections.abc import Sequence
from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.responses import Response

from ...api.error_replies import OpenAIError
from ...api.openai.replies import ModelCard, ModelList
from ...core.errors import ModelNotFound, shown
from ..interfaces import Engine


class ServedModels:
    """The names under which the one loaded checkpoint is served."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(dict.fromkeys(names))

    def resolve(self, name: str | None) -> str:
        """The name for the reply. Without a name, the first served name. Raises ModelNotFound."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            known = ", ".join(f"`{served}`" for served in self.names)
            raise ModelNotFound(f"The model `{shown(name)}` does not exist. This server serves {known}.", param="model")
        return name


def models_routes(engine: Engine, models: ServedModels) -> APIRouter:
    router = APIRouter(tags=["Models"])

    def card(name: str) -> ModelCard:
        info = engine.info
        return ModelCard(
            id=name,
            object="model",
            created=info.created,
            owned_by="vllm-mlx",
            root=info.model,
            max_model_len=info.max_model_len,
            type="model",
            display_name=name,
            created_at=datetime.fromtimestamp(info.created, UTC).isoformat().replace("+00:00", "Z"),
            lifecycle="active",
            max_input_tokens=info.max_model_len,
        )

    @router.get("/v1/models", responses={200: {"model": ModelList}})
    async def list_models() -> Response:
        cards = [card(name) for name in models.names]
        return _json(ModelList(object="list", data=cards, first_id=cards[0].id, last_id=cards[-1].id, has_more=False))

    @router.get("/v1/models/{model_id:path}", responses={200: {"model": ModelCard}, "4XX": {"model": OpenAIError}})
    async def show_model(model_id: str) -> Response:
        return _json(card(models.resolve(model_id)))

    return router


def _json(reply: ModelList | ModelCard) -> Response:
    return Response(reply.to_json(), media_type="application/json")
