"""vllm-mlx: text and vision models on one Mac, behind the OpenAI and Anthropic APIs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Choice",
    "Grammar",
    "Guide",
    "JsonSchema",
    "MediaConfig",
    "Regex",
    "SamplingParams",
    "StructuralTag",
    "__version__",
]

if TYPE_CHECKING:
    from .core.config import MediaConfig
    from .core.request import Choice, Grammar, Guide, JsonSchema, Regex, SamplingParams, StructuralTag
    from .llm import LLM

_HOMES = {
    "LLM": ".llm",
    "MediaConfig": ".core.config",
    "SamplingParams": ".core.request",
    **dict.fromkeys(("Choice", "Grammar", "Guide", "JsonSchema", "Regex", "StructuralTag"), ".core.request"),
}


def __getattr__(name: str) -> Any:
    # Lazy: the command's help and the pure packages must not pay for importing mlx.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
