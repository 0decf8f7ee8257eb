"""How model families write their thoughts, by the names that users choose them with."""

from functools import partial

from .bodies import BodyStatus
from .bodies.header_body import harmony_route, header, recipient_route, suffix_route
from .family import MessageTags, Opening, Place, ReasoningFormat


def _tags(open: str, close: str) -> ReasoningFormat:
    return ReasoningFormat((open,), (close,))


_THINK = _tags("<think>", "</think>")
_ALWAYS = partial(ReasoningFormat, ("<think>",), ("</think>",), is_implied=True)

_MESSAGE = "<|message|>"
_HARMONY_HEADER = header(_MESSAGE, harmony_route)
HARMONY_HEADERS = (
    Opening("<|channel|>", _HARMONY_HEADER),
    Opening("<|start|>", _HARMONY_HEADER),
    Opening("to=functions.", _HARMONY_HEADER, Place.AT_START, keeps_marker=True),
)
_HARMONY = ReasoningFormat(
    opens=(),
    closes=("<|end|>", "<|return|>"),
    headers=HARMONY_HEADERS,
    header_tags=(_MESSAGE, "<|constrain|>"),
    gate=(("<|channel|>analysis<|message|>",), ("<|channel|>final<|message|>",)),
    messages=MessageTags("<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"),
    atoms=("<|channel|>",),
)
_RECIPIENT_HEADER = header(_MESSAGE, recipient_route)
_MUSE = ReasoningFormat(
    opens=(),
    closes=("<|eom|>", "<|eot|>"),
    headers=(
        Opening("<|start|>", _RECIPIENT_HEADER),
        Opening("to=", _RECIPIENT_HEADER, Place.AT_START, keeps_marker=True),
        Opening("assistant to=", _RECIPIENT_HEADER, Place.AT_START, keeps_marker=True),
    ),
    header_tags=(_MESSAGE,),
    gate=(("to=self<|message|>",), ("to=user<|message|>",)),
    messages=MessageTags("<|eom|>", "<|start|>assistant", " to=user<|message|>"),
    atoms=(_MESSAGE,),
)
_GRANITE = ReasoningFormat(
    ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
)
_SUFFIXED = ReasoningFormat(
    ("<think>",),
    ("</think>",),
    headers=(
        Opening("<think:", header(">", suffix_route(BodyStatus.REASONING))),
        Opening("</think:", header(">", suffix_route(BodyStatus.TEXT))),
    ),
)
_COHERE = ReasoningFormat(
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
)
_INKLING = ReasoningFormat(
    ("<|content_thinking|>",),
    ("<|end_message|>", "<|content_text|>", "<|message_model|>", "<|content_model_end_sampling|>"),
)
_IFM = ReasoningFormat(
    ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
    ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
)
_FRAMES = ReasoningFormat(
    ("<|open|>think<|sep|>",),
    ("<|close|>think<|sep|>", "<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    atoms=("<|close|>",),
)

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "qwen3": _THINK,
    "deepseek_r1": _ALWAYS(),
    "minimax_m2": _ALWAYS(),
    "minimax_m2_append_think": _ALWAYS(is_shown=True),
    "minimax_m3": _tags("<mm:think>", "</mm:think>"),
    "openai_gptoss": _HARMONY,
    "mistral": ReasoningFormat(("[THINK]", "<think>"), ("[/THINK]", "</think>")),
    "gemma4": _tags("<|channel>thought", "<channel|>"),
    "granite": _GRANITE,
    "seed_oss": _tags("<seed:think>", "</seed:think>"),
    "step3": _ALWAYS(),
    "hunyuan_a13b": ReasoningFormat(("<think>",), ("</think>",), wrap=("<answer>", "</answer>")),
    "ernie45": ReasoningFormat(("<think>",), ("</think>",), wrap=("<response>", "</response>")),
    "hy_v4": _SUFFIXED,
    "k2_horizon": _IFM,
    "kimi_k3": _FRAMES,
    "cohere_command3": _COHERE,
    "inkling": _INKLING,
    "plamo3": ReasoningFormat(
        ("<|plamo:begin_think:plamo|>",), ("<|plamo:end_think:plamo|>",), atoms=("<|plamo:end_",)
    ),
    "muse": _MUSE,
    "longcat": _tags("<longcat_think>", "</longcat_think>"),
    "apertus": _tags("<|inner_prefix|>", "<|inner_suffix|>"),
}
_ALIASES = {
    "qwen3": (
        "deepseek_v3", "deepseek_v4", "deepseek_v41", "glm4", "glm45", "glm47", "ling3", "poolside_v1", "holo2",
        "kimi_k2", "mimo", "minicpmv", "minicpm5", "nemotron_v3", "nemotron_3", "olmo3", "step3p5", "hy_v3",
        "granite_thinking_parser", "dots", "nanbeige", "interns1", "gigachat35", "iquest_q1", "kimi", "glm",
    ),
    "deepseek_r1": ("step5", "qwq"),
    "openai_gptoss": ("gpt_oss", "harmony"),
    "cohere_command3": ("cohere_command4",),
    "muse": ("muse_glimmer", "musespark1x"),
    "hunyuan_a13b": ("hunyuan",),
    "minimax_m2": ("minimax",),
    "apertus": ("apertus2509",),
}  # fmt: skip
REASONING_FORMATS |= {alias: REASONING_FORMATS[name] for name, aliases in _ALIASES.items() for alias in aliases}
_SGLANG_ALIASES = {
    "deepseek-r1": "deepseek_r1", "deepseek-v3": "deepseek_v3", "deepseek-v4": "deepseek_v4",
    "deepseek-v41": "deepseek_v41", "gpt-oss": "gpt_oss", "qwen3-thinking": "qwen3",
    "minimax-append-think": "minimax_m2_append_think", "minimax-m3": "minimax_m3",
}  # fmt: skip
REASONING_FORMATS |= {alias: REASONING_FORMATS[name] for alias, name in _SGLANG_ALIASES.items()}
