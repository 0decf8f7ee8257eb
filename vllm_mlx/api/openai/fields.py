"""Fields that the wire types do not declare: which values are ignored, and which are refused.

A field in neither table is refused as unknown.
"""

from ..wire import ExtraFields, Ignored, Refused

_TOOLS = "Use `tools` and `tool_choice`."
_AUDIO = "This server generates no audio."

BODY_FIELDS: ExtraFields = {
    # OpenAI
    "user": Ignored("names the end user for abuse reports"),
    "safety_identifier": Ignored("names the end user for abuse reports"),
    "metadata": Ignored("labels for stored replies; nothing is stored"),
    "store": Ignored("nothing is stored", (False,), "Replies are not stored; leave `store` out."),
    "service_tier": Ignored("there is one tier", ("auto", "default"), "This server has one tier: use 'auto'."),
    "prompt_cache_key": Ignored("a routing hint; the prefix cache finds every prefix by itself"),
    "prompt_cache_retention": Ignored("a hint; the prefix cache keeps what memory allows"),
    "prompt_cache_options": Ignored("a hint; the prefix cache finds every prefix by itself"),
    "prediction": Ignored("it may speed a reply up, but never changes it"),
    "modalities": Ignored("replies are text", (["text"],), "This server replies with text only."),
    "verbosity": Ignored("it is the default", ("medium",), "Ask for a short or long reply in the prompt."),
    "moderation": Refused("This server does not moderate."),
    "audio": Refused(_AUDIO),
    "web_search_options": Refused("This server has no web search; offer one through `tools`."),
    "functions": Refused(_TOOLS),
    "function_call": Refused(_TOOLS),
    "suffix": Refused("Filling in between two texts is not supported."),
    # vLLM and kin
    "documents": Refused("Put documents into the messages."),
    "guided_decoding_backend": Ignored("there is one backend"),
    "guided_whitespace_pattern": Refused("White space is always bounded."),
    "return_token_ids": Ignored("it is the default", (False,), "Token ids are not returned."),
    "return_tokens_as_token_ids": Ignored("it is the default", (False,), "Token ids are not returned."),
    "prompt_logprobs": Refused("Log-probabilities of the prompt are not supported."),
    "use_beam_search": Ignored("it is the default", (False,), "Beam search is not supported."),
    "length_penalty": Ignored("it is the default", (1, 1.0), "It belongs to beam search, which is not supported."),
    "spaces_between_special_tokens": Ignored("it is the default", (True,), "It is not supported."),
    "add_special_tokens": Refused("It is not supported."),
    "truncate_prompt_tokens": Refused("Shorten the prompt on your side."),
    "priority": Ignored("it is the default", (0,), "Requests are served first come, first served."),
    "repetition_detection": Refused("It is not supported."),
    "stream_interval": Ignored("it is the default", (1,), "Every token is sent as soon as it is sampled."),
    "typical_p": Ignored("it is the default: off", (1, 1.0), "It is not supported."),
    "cache_prompt": Ignored("the prefix cache is always on", (True,), "The prefix cache is always on."),
}

STREAM_OPTION_FIELDS: ExtraFields = {
    "include_obfuscation": Ignored("padding against traffic analysis; chunks carry none"),
    "continuous_usage_stats": Ignored("it is the default", (False,), "Usage is sent once, in the last chunk."),
}

MESSAGE_FIELDS: ExtraFields = {
    "id": Ignored("the client's own bookkeeping"),
    "annotations": Ignored("citations that an earlier reply carried; the text holds them too"),
    "cache_control": Ignored("a hint; the prefix cache finds every prefix by itself"),
    "provider_specific_fields": Ignored("the client library's own bookkeeping"),
    "refusal": Ignored("only an assistant's refusal is text"),
    "audio": Refused("Audio is not supported."),
    "function_call": Refused("Use `tool_calls`."),
}

PART_FIELDS: ExtraFields = {
    "cache_control": Ignored("a hint; the prefix cache finds every prefix by itself"),
    "prompt_cache_breakpoint": Ignored("a hint; the prefix cache finds every prefix by itself"),
    "annotations": Ignored("citations that an earlier reply carried; the text holds them too"),
}

TOOL_CALL_FIELDS: ExtraFields = {
    "index": Ignored("a remainder of a streamed reply"),
    "provider_specific_fields": Ignored("the client library's own bookkeeping"),
    "extra_content": Ignored("the client library's own bookkeeping"),
}

TOOL_FIELDS: ExtraFields = {
    "cache_control": Ignored("a hint; the prefix cache finds every prefix by itself"),
}
