"""Durations as a report shows them."""


def milliseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1000 * each for each in seconds) or [0.0]
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(len(ordered) - 1, int(len(ordered) * at))], 1) for name, at in places.items()}
