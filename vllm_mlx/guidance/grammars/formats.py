"""JSON Schema's formats of strings as patterns, where one is known. Each matches valid texts alone, not all of them."""

from collections.abc import Mapping

_LEAP_YEAR = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_MONTHS = r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"([0-9]{{4}}-{_MONTHS}|{_LEAP_YEAR}-02-29)"
_HOUR = r"([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+\-]{_HOUR}:[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[a-zA-Z0-9]{1,32}(-[a-zA-Z0-9]{1,32}){0,4}"
_HEX = "[0-9a-fA-F]"

FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]{1,3}D(T[0-9]{1,2}H)?|T[0-9]{1,4}[HMS])",
    "email": rf"[a-zA-Z0-9_+]{{1,32}}(\.[a-zA-Z0-9_+]{{1,32}}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,4}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": f"({_HEX}{{1,4}}:){{7}}{_HEX}{{1,4}}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "uri": rf"https?:\/\/{_LABEL}(\.{_LABEL}){{0,4}}(:[0-9]{{1,5}})?(\/[a-zA-Z0-9._~\-]{{1,64}}){{0,16}}\/?",
}
NARROWED = frozenset({"date", "time", "date-time"})  # of which llguidance lets invalid ones pass
