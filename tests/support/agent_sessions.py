"""Lengths of recorded sessions of coding agents: tokens of each prompt of a session, as its characters over four.

Each prompt begins with the one before it and the reply to it. The sessions were recorded against a scripted server, so
that lengths of replies and pauses are none of a model's: they are set here.
"""

from .device_serving import Turn

REPLY_TOKENS = 200
PAUSE_S = 1.0  # a tool runs

SESSIONS = {
    "Claude Code, long": (
        12595, 12817, 16583, 21383, 23183, 27432, 27598, 28003, 28143, 28538, 29002, 29108, 29184, 29296, 29502,
    ),
    "Claude Code, short": (12624, 12718, 12819, 12946, 13052, 13146, 13247, 13374),
    "Codex": (10118, 10349, 13088, 15820, 17607, 20326, 20512, 20634, 20843),
    "opencode": (7783, 7987, 11760, 16567, 16659, 20942, 21051, 21153),
}  # fmt: skip


def agents() -> list[list[Turn]]:
    return [[Turn(num_tokens, REPLY_TOKENS, PAUSE_S) for num_tokens in session] for session in SESSIONS.values()]
