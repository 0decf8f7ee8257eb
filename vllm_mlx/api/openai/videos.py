"""Videos as chat completions name them: vLLM's `video_url`, and Qwen's list of frames. Fetches and decodes nothing."""

from dataclasses import replace

from ...core.messages import MediaPart, VideoPart
from ...core.request import Request
from ...media.parts import media_parts, replace_media
from .schema import FramesContent, ProcessorOptions, VideoContent


def decode_video(part: VideoContent, path: str) -> VideoPart:
    """The address may stand where the object with the address belongs, as for images."""
    video = part.video_url
    if isinstance(video, str):
        return VideoPart(video, fps=part.fps, param=f"{path}video_url")
    return VideoPart(video.url, fps=part.fps, param=f"{path}video_url")


def decode_frames(part: FramesContent, path: str) -> VideoPart:
    return VideoPart(tuple(part.video), fps=part.fps, param=f"{path}video")


def with_options(request: Request, options: ProcessorOptions | None) -> Request:
    """What a request says for all of its videos; each may say otherwise."""
    if options is None:
        return request
    return replace_media(request, {part: _at(part, options.fps) for part in media_parts(request)})


def _at(part: MediaPart, fps: float | None) -> MediaPart:
    return replace(part, fps=fps) if isinstance(part, VideoPart) and part.fps is None else part
