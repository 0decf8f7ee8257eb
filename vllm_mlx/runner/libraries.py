"""mlx-lm, imported without the effects of its import on this process."""

import resource
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

_set_limit = resource.setrlimit
# mlx-lm sets 2,048 open files and at most 4,096, and fails where fewer may be open.
resource.setrlimit = lambda *_: None
try:
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear
    from mlx_lm.utils import MODEL_REMAPPING, load_model
finally:
    resource.setrlimit = _set_limit

__all__ = ["QuantizedSwitchLinear", "SwitchGLU", "SwitchLinear", "knows", "load_model", "make_prompt_cache"]


def knows(config: Mapping[str, Any]) -> bool:
    """Return whether mlx-lm has a module for the family, or the checkpoint brings its own."""
    name = str(config["model_type"])
    try:
        return bool(config.get("model_file") or find_spec(f"mlx_lm.models.{MODEL_REMAPPING.get(name, name)}"))
    except (ImportError, ValueError):  # the name has a dot
        return False
