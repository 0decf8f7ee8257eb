"""Calls of a conversation and their results. Without ids, results come in the order of the calls."""

from ..core.errors import InvalidParameter


class PastCalls:
    """The calls of one conversation so far. A result has the name of the latest call with its id."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by id
        self._waiting: dict[str, bool] = {}  # ids of calls without a result, and whether the client left the id out
        self._num_given = 0

    def add(self, call_id: str | None, name: str) -> str:
        """Return the id of a call: its own, or one that is given to a call without."""
        is_given = not call_id
        if not call_id:
            self._num_given += 1
            call_id = f"call_without_id_{self._num_given}"
        self._names[call_id] = name
        self._waiting[call_id] = is_given
        return call_id

    def answered(self, call_id: str | None, param: str) -> tuple[str, str | None]:
        """Return the id and the name of the call to which a result belongs. The name is None if it is not known.

        A result without an id belongs to the first call that waits for one, and a result with an unknown id to the
        first such call that came without an id. Raises InvalidParameter, naming `param`, if an id is missing.
        """
        if not call_id or call_id not in self._names:
            waiting = (other for other, is_given in self._waiting.items() if is_given or not call_id)
            call_id = next(waiting, call_id)
        if not call_id:
            raise InvalidParameter(f"`{param}` is required.", param=param, code="missing_required_parameter")
        self._waiting.pop(call_id, None)
        return call_id, self._names.get(call_id)
