"""What `doctor` found of one thing."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["good", "warning", "bad"]


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    verdict: Verdict  # bad: the server cannot work; warning: it works, not as well as it could
    text: str
