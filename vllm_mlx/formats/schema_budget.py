"""How much work the JSON schemas of one request may cost. Counts work; reads no clock."""

from ..core.errors import InvalidParameter

MAX_SCHEMA_VISITS = 100_000


class SchemaBudget:
    """A budget of visits. Every walk over a request's schemas spends from it before it does the work."""

    def __init__(self, max_visits: int = MAX_SCHEMA_VISITS):
        self._max_visits = max_visits
        self.num_visits = 0

    def spend(self, param: str, num: int = 1) -> None:
        """Pay for visiting `num` schemas or values. Raises InvalidParameter, naming `param` and the limit."""
        self.num_visits += num
        if self.num_visits > self._max_visits:
            raise InvalidParameter(
                f"`{param}`: the schemas of this request are too complex. Together they may take at "
                f"most {self._max_visits} visits of a schema or value. Send fewer tools, or simpler schemas.",
                param=param,
            )
