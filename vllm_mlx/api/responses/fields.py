"""Fields, items and values that are ignored, and the ones that are refused.

A field in neither table is refused as unknown; so is an item of unknown type.
"""

from ..wire import ExtraFields, Ignored, Refused

_BUILT_IN = "It belongs to a built-in tool, and this server has none."

BODY_FIELDS: ExtraFields = {
    "user": Ignored("names the end user for abuse reports"),
    "safety_identifier": Ignored("names the end user for abuse reports"),
    "client_metadata": Ignored("the client's own bookkeeping"),
    "service_tier": Ignored("there is one tier", ("auto", "default"), "This server has one tier: use 'auto'."),
    "prompt_cache_key": Ignored("a routing hint; the prefix cache finds every prefix by itself"),
    "prompt_cache_retention": Ignored("a hint; the prefix cache keeps what memory allows"),
    "prompt_cache_options": Ignored("a hint; the prefix cache finds every prefix by itself"),
    "stream_options": Ignored("padding against traffic analysis; events carry none"),
    "max_tool_calls": Ignored("limits built-in tools; this server has none"),
    "truncation": Ignored(
        "it is the default",
        ("disabled",),
        "Shorten the input on your side: a prompt cut in the middle is a new prompt.",
    ),
    "top_logprobs": Ignored("it is the default", (0,), "Use /v1/chat/completions for log-probabilities."),
    "modalities": Ignored("replies are text", (["text"],), "This server replies with text only."),
    "conversation": Refused("Use `previous_response_id`, or send the complete input."),
    "prompt": Refused("This server keeps no prompts. Send the text itself."),
    "moderation": Refused("This server does not moderate."),
    "context_management": Refused("Shorten the input on your side."),
}

INCLUDED: ExtraFields = {
    "reasoning.encrypted_content": Ignored("honoured: the client sends the reasoning back inside the item"),
    "web_search_call.action.sources": Ignored(_BUILT_IN),
    "web_search_call.results": Ignored(_BUILT_IN),
    "file_search_call.results": Ignored(_BUILT_IN),
    "code_interpreter_call.outputs": Ignored(_BUILT_IN),
    "computer_call_output.output.image_url": Ignored(_BUILT_IN),
    "message.input_image.image_url": Ignored("input items are listed as they were sent"),
    "message.output_text.logprobs": Refused("Use /v1/chat/completions for log-probabilities."),
}

# Items that another server or the client made for itself. The model here never saw them.
SKIPPED_ITEMS = frozenset(
    {
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "compaction",
        "compaction_summary",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "ghost_snapshot",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
