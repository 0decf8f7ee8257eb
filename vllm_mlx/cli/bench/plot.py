"""Figures as a picture: an SVG of three small charts, a line for each workload. Needs no library and no fonts."""

from collections.abc import Callable, Sequence
from html import escape

from .figures import Figures

_COLOURS = {"new": "#2563eb", "shared": "#059669", "turns": "#d97706"}
_WIDTH, _HEIGHT, _MARGIN = 280, 200, 48
_CHARTS: tuple[tuple[str, Callable[[Figures], float | None]], ...] = (
    ("tokens/s of all replies", lambda each: each.tokens_per_s),
    ("TTFT p50, ms", lambda each: None if each.ttft_p50_s is None else each.ttft_p50_s * 1000),
    ("ITL p99, ms", lambda each: None if each.itl_p99_s is None else each.itl_p99_s * 1000),
)


def svg(title: str, rows: Sequence[Figures]) -> str:
    width = len(_CHARTS) * (_WIDTH + _MARGIN) + _MARGIN
    height = _HEIGHT + 3 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_MARGIN}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for number, (name, value) in enumerate(_CHARTS):
        parts += _chart(name, value, rows, left=_MARGIN + number * (_WIDTH + _MARGIN))
    for number, workload in enumerate(dict.fromkeys(row.workload for row in rows)):
        x, y = _MARGIN + number * 110, height - 12
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_COLOURS[workload]}"/>')
        parts.append(f'<text x="{x + 15}" y="{y}">{workload}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _chart(name: str, value: Callable[[Figures], float | None], rows: Sequence[Figures], left: int) -> list[str]:
    top, bottom = 2 * _MARGIN - 30, 2 * _MARGIN - 30 + _HEIGHT
    steps = sorted({row.concurrency for row in rows})
    known = [(row, found) for row in rows if (found := value(row)) is not None]
    highest = max((found for _, found in known), default=0.0) or 1.0
    spread = max(1, len(steps) - 1)

    def place(row: Figures, found: float) -> tuple[float, float]:
        x = left + steps.index(row.concurrency) * (_WIDTH - 20) / spread
        return x, bottom - found / highest * (_HEIGHT - 20)

    parts = [
        f'<text x="{left}" y="{top - 4}">{escape(name)}</text>',
        f'<path d="M{left} {top}V{bottom}H{left + _WIDTH - 20}" fill="none" stroke="#999"/>',
        f'<text x="{left - 4}" y="{top + 24}" text-anchor="end" fill="#666">{highest:.3g}</text>',
    ]
    for step in steps:
        x = left + steps.index(step) * (_WIDTH - 20) / spread
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#666">{step}</text>')
    for workload in dict.fromkeys(row.workload for row in rows):
        points = [place(row, found) for row, found in known if row.workload == workload]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{_COLOURS[workload]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOURS[workload]}"/>' for x, y in points]
    return parts
