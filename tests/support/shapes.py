"""Draws the images that the demo's frozen questions describe: one pure colour in the middle of white."""

import math

from PIL import Image, ImageDraw


def draw_shape(color: str, shape: str, side: int) -> Image.Image:
    image = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(image)
    centre, r = side / 2, side * 0.375
    match shape:
        case "circle":
            draw.ellipse([centre - r, centre - r, centre + r, centre + r], fill=color)
        case "square":
            half = r * 0.88
            draw.rectangle([centre - half, centre - half, centre + half, centre + half], fill=color)
        case "triangle":
            left, right, foot = centre - r * 0.95, centre + r * 0.95, centre + r * 0.8
            draw.polygon([(centre, centre - r), (left, foot), (right, foot)], fill=color)
        case "star":
            draw.polygon([star_point(centre, r, k) for k in range(10)], fill=color)
    return image


def star_point(centre: float, r: float, k: int) -> tuple[float, float]:
    radius = r if k % 2 == 0 else r * 0.42
    angle = -math.pi / 2 + k * math.pi / 5
    return centre + radius * math.cos(angle), centre + radius * math.sin(angle)
