"""vllm-mlx: text and vision models on one Mac, behind the OpenAI and Anthropic APIs."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from .core.request import SamplingParams
    from .llm import LLM


def __getattr__(name: str) -> Any:
    # Lazy: `vllm-mlx --help` and the pure packages must not pay for importing mlx.
    if name == "LLM":
        from .llm import LLM

        return LLM
    if name == "SamplingParams":
        from .core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
