"""How much work the JSON schemas of one request may cost. Counts; reads no clock."""

from ..core.errors import InvalidParameter

MAX_SCHEMA_VISITS = 100_000


class SchemaBudget:
    """All walks over the schemas of one request spend from it, before they do the work."""

    def __init__(self, max_visits: int = MAX_SCHEMA_VISITS):
        self._max_visits = max_visits
        self.num_visits = 0

    def spend(self, param: str, num: int = 1) -> None:
        """`num` schemas, or values of one, are visited next. Raises InvalidParameter, naming `param` and the bound."""
        self.num_visits += num
        if self.num_visits > self._max_visits:
            raise InvalidParameter(
                f"`{param}`: the schemas of this request are too complex. Together they may take at "
                f"most {self._max_visits} visits of a schema or value. Send fewer tools, or simpler schemas.",
                param=param,
            )
