"""One coloured shape on a plain ground, and its patches."""

import math
import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

COLORS = {
    "red": ((220, 30, 30), (255, 0, 0)),
    "green": ((30, 160, 50), (0, 128, 0)),
    "blue": ((40, 70, 220), (0, 0, 255)),
    "yellow": ((240, 215, 30), (255, 255, 0)),
    "purple": ((140, 40, 170), (128, 0, 128)),
    "orange": ((250, 135, 20), (255, 165, 0)),
}
SHAPES = ("circle", "square", "triangle", "star")
PATCH, MERGE = 16, 2
BACKGROUNDS = ((255, 255, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128))


@dataclass(frozen=True, slots=True)
class Picture:
    image: Image.Image
    color: str
    shape: str

    def phrase(self) -> str:
        """Return `a red circle`, `an orange star`."""
        article = "an" if self.color[0] in "aeiou" else "a"
        return f"{article} {self.color} {self.shape}"


def tint(rng: random.Random, color: str) -> tuple[int, int, int]:
    """Return a shade of the colour: half the time one of its exact values, else a near one."""
    base = rng.choice(COLORS[color])
    if rng.random() < 0.5:
        return base
    return tuple(min(255, max(0, c + rng.randint(-20, 20))) for c in base)


def canvas(rng: random.Random, small: bool) -> tuple[int, int]:
    if small:
        return (rng.choice((64, 64, 96)),) * 2
    if rng.random() < 0.2:
        return rng.choice((64, 96, 128, 160)), rng.choice((64, 96, 128, 160))
    return (rng.choice((64, 64, 96, 128, 128, 160, 224)),) * 2


def star(cx: float, cy: float, r: float) -> list[tuple[float, float]]:
    points = []
    for k in range(10):
        radius = r if k % 2 == 0 else r * 0.42
        angle = -math.pi / 2 + k * math.pi / 5
        points.append((cx + radius * math.cos(angle), cy + radius * math.sin(angle)))
    return points


def paint(draw: ImageDraw.ImageDraw, shape: str, box: tuple[float, float, float], fill) -> None:
    cx, cy, r = box
    if shape == "circle":
        draw.ellipse([cx - r, cy - r, cx + r, cy + r], fill=fill)
    elif shape == "square":
        q = r * 0.88
        draw.rectangle([cx - q, cy - q, cx + q, cy + q], fill=fill)
    elif shape == "triangle":
        draw.polygon([(cx, cy - r), (cx - r * 0.95, cy + r * 0.8), (cx + r * 0.95, cy + r * 0.8)], fill=fill)
    else:
        draw.polygon(star(cx, cy, r), fill=fill)


def picture(rng: random.Random, *, small: bool = False) -> Picture:
    color, shape = rng.choice(list(COLORS)), rng.choice(SHAPES)
    width, height = canvas(rng, small)
    fill = tint(rng, color)
    if rng.random() < 0.04:  # a plain tile reads as a square
        return Picture(Image.new("RGB", (width, height), fill), color, "square")
    ground = rng.choice((*BACKGROUNDS, (rng.randint(200, 255),) * 3))
    image = Image.new("RGB", (width, height), ground)
    side = min(width, height)
    r = rng.uniform(0.22, 0.46) * side
    cx, cy = rng.uniform(r, width - r), rng.uniform(r, height - r)
    if rng.random() < 0.4:
        cx, cy = width / 2, height / 2
    paint(ImageDraw.Draw(image), shape, (cx, cy, r), fill)
    return Picture(image, color, shape)


def patches(image: Image.Image) -> tuple[np.ndarray, tuple[int, int, int]]:
    """(patches, 3*2*16*16) float32 and the grid (t, h, w), as the Qwen-VL image processor gives them.

    Sides must be multiples of 32, so that no resizing is due.
    """
    pixels = (np.asarray(image, np.float32).transpose(2, 0, 1) / 255.0 - 0.5) / 0.5
    channels, height, width = pixels.shape
    rows, columns = height // PATCH, width // PATCH
    frames = np.stack([pixels, pixels])
    blocks = frames.reshape(1, 2, channels, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH).transpose(
        0, 3, 6, 4, 7, 2, 1, 5, 8
    )
    flat = blocks.reshape(rows * columns, channels * 2 * PATCH * PATCH)
    return np.ascontiguousarray(flat), (1, rows, columns)
