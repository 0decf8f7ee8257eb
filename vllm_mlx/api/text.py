"""Text as tokenizers can take it: JSON may carry half a surrogate pair, where a client cut a string inside an emoji."""

import json
from typing import Any


def well_formed(text: str) -> str:
    """`text` with each lone surrogate replaced by U+FFFD and each split pair joined."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def well_formed_json(value: Any) -> Any:
    """The same for every string inside a JSON value, which is returned as it is if it needs nothing."""
    text = json.dumps(value, ensure_ascii=False)
    clean = well_formed(text)
    return value if clean is text else json.loads(clean)
