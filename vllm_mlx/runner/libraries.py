"""mlx-lm, imported without what its import does to this process."""

import resource

_set_limit = resource.setrlimit
# mlx-lm sets 2,048 open files and at most 4,096, and fails where fewer may be open.
resource.setrlimit = lambda *_: None
try:
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model
finally:
    resource.setrlimit = _set_limit

__all__ = ["load_model", "make_prompt_cache"]
