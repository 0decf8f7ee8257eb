"""What the images and videos of a request show, and how that is found. Decodes nothing."""

from collections.abc import Mapping

from ...core.messages import ImagePart, MediaPart, VideoPart
from ..videos.clip import Clip
from .picture import Picture, Seen

Key = str | bytes | VideoPart
Shown = Mapping[Key, Picture | Seen | Clip]


def shown_as(part: MediaPart) -> Key:
    """A picture is decoded once, however it is shown; of a video, that decides which frames are."""
    return part.source if isinstance(part, ImagePart) else part
