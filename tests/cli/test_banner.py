"""The block that says the server is ready."""

import io
import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from vllm_mlx.cache.stats import DiskReport
from vllm_mlx.cli.serve import Banner, layers
from vllm_mlx.cli.settings import is_local, local_url
from vllm_mlx.core.config import ModelInfo

LOADED = {
    "takes_chats": True,
    "template_needs": [],
    "sliding_windows": [],
    "keeps_recurrent_state": True,
    "copied_whole": [],
    "prefix_cache": True,
    "no_prefix_cache": None,
    "reasoning_parser": "think",
    "tool_call_parser": None,
    "no_videos": "it takes no images either",
    "no_shared_forward": None,
    "no_drafts": None,
    "no_head": None,
    "max_pixels": None,
}


DISK = DiskReport(folder="/caches/vllm-mlx", max_bytes=38_200_000_000)


def banner(*, names: tuple[str, ...] = ("demo",), api_keys: tuple[str, ...] = (), host: str = "127.0.0.1") -> Banner:
    info = ModelInfo(
        model="/models/a [b]", architecture="qwen3", max_model_len=40960, weights_bytes=4_600_000_000,
        vocab_size=1000, created=0,
    )  # fmt: skip
    url = local_url(host, 8000)
    return Banner(
        info=info, loaded=LOADED, text_only=False, max_pixels=None, budget_bytes=12 * 10**9, disk=DISK,
        load_s=1.0, names=names,
        api_keys=api_keys, url=url, host=host,
    )  # fmt: skip


@pytest.mark.parametrize(("reason", "off"), [(None, []), ("why", ["videos: why"])])
def test_what_may_be_shown_is_said(reason: str | None, off: list[str]) -> None:
    info = replace(banner().info, takes_images=True)
    loaded = {**LOADED, "no_videos": reason, "tool_call_parser": "hermes"}
    facts = replace(banner(), info=info, loaded=loaded).facts()
    assert dict(facts)["Architecture"].endswith("takes images" if reason else "takes images and videos")
    assert [fact for name, fact in facts if name == "Off"] == off


def test_a_slow_vision_encoder_is_named_with_the_size_that_it_reads() -> None:
    slow = replace(banner(), loaded={**LOADED, "max_pixels": 1 << 20})
    said = "scaled down to 1 megapixels, which the vision encoder reads within 3 s; --max-pixels sets another size"
    assert dict(slow.facts())["Images"] == said
    assert "Images" not in dict(replace(slow, max_pixels=1 << 20).facts())
    assert "Images" not in dict(replace(slow, loaded={**LOADED, "max_pixels": 4 << 20}).facts())


def test_layers_formats_and_what_is_off_are_said() -> None:
    facts = banner().facts()
    assert ("Layers", "recurrent state beside attention: resumes at snapshots") in facts
    assert ("Formats", "reasoning think, tool calls none") in facts
    assert [fact for name, fact in facts if name == "Off"] == [
        "images and videos: the checkpoint has no vision encoder",
        "tool calls: the chat template shows no known format of tool calls",
    ]


def test_of_several_models_it_says_which_lacks_something_and_whether_all_fit() -> None:
    several = replace(banner(), beside=[(("small",), banner().info)])
    facts = several.facts()
    assert ("Off", "for demo, images and videos: the checkpoint has no vision encoder") in facts
    assert dict(facts)["Memory"] == "at most 12.0 GB, of which the weights of all models take 9.2 GB"
    tight = dict(replace(several, budget_bytes=8 * 10**9).facts())["Memory"]
    assert tight == "at most 8.0 GB, so not all models fit at once: their weights take 9.2 GB"


KEPT = "conversations are kept in /caches/vllm-mlx, up to 38.2 GB; --cache-disk 0 turns this off"


@pytest.mark.parametrize(
    ("disk", "on", "off"),
    [
        (DISK, [KEPT], []),
        (None, [], ["prefix cache on disk: --cache-disk 0 is set"]),
        (replace(DISK, off_reason="/caches is full"), [], ["prefix cache on disk: /caches is full"]),
    ],
)
def test_what_is_kept_on_disk_is_said_and_how_to_turn_it_off(
    disk: DiskReport | None, on: list[str], off: list[str]
) -> None:
    facts = replace(banner(), disk=disk).facts()
    assert [fact for name, fact in facts if name == "On disk"] == on
    assert [fact for name, fact in facts if name == "Off" and "on disk" in fact] == off


def test_without_a_prefix_cache_nothing_more_is_said_of_the_disk() -> None:
    facts = replace(banner(), disk=None, loaded={**LOADED, "prefix_cache": False}).facts()
    assert not [fact for _, fact in facts if "on disk" in fact]


@pytest.mark.parametrize(
    ("loaded", "text"),
    [
        ({}, "attention: resumes at any token"),
        ({"sliding_windows": [512]}, "attention, windows of 512: resumes where its window is kept"),
        ({"copied_whole": ["OwnCache"]}, "attention, OwnCache copied whole: resumes at snapshots"),
        (
            {"copied_whole": ["OwnCache"], "no_prefix_cache": "why"},
            "attention, OwnCache copied whole: computes every prompt from its first token",
        ),
    ],
)
def test_where_a_model_resumes(loaded: dict[str, Any], text: str) -> None:
    assert layers({**LOADED, "keeps_recurrent_state": False, **loaded}) == text


@pytest.mark.parametrize(
    ("loaded", "line"),
    [
        ({"no_drafts": "why"}, ("Off", "drafts of the next tokens: why")),
        ({"no_head": "why"}, ("Off", "drafts by an MTP head: why")),
        ({"prefix_cache": False, "no_prefix_cache": "why"}, ("Off", "prefix cache: why")),
        ({"prefix_cache": False}, ("Off", "prefix cache: --no-prefix-cache or --repeatable is set")),
        ({"template_needs": ["a", "b"]}, ("Template", "conversations are rewritten for it: a, b")),
    ],
)
def test_what_a_model_lacks_and_needs_is_a_line(loaded: dict[str, Any], line: tuple[str, str]) -> None:
    assert line in replace(banner(), loaded={**LOADED, **loaded}).facts()
    assert line not in banner().facts()


def printed(banner: Banner, *, terminal: bool = False) -> str:
    out = io.StringIO()
    banner.print_to(Console(file=out, width=40, force_terminal=terminal, color_system=None, highlight=False))
    return out.getvalue()


def pasted(text: str) -> list[str]:
    """The words a shell makes of the printed command."""
    command = text[text.index("curl ") : text.index("\n\nCtrl-C")]
    return shlex.split(command.replace("\\\n", " "))


def test_the_block_says_what_is_served() -> None:
    text = printed(banner())
    for fact in ("demo", "/models/a [b]", "qwen3", "4.6 GB", "40,960", "12.0 GB", "http://127.0.0.1:8000/v1"):
        assert fact in text


@pytest.mark.parametrize("name", ["demo", 'it\'s "quoted"', "a name much longer than the terminal is wide " * 2])
def test_the_request_can_be_pasted_whatever_the_name(name: str) -> None:
    words = pasted(printed(banner(names=(name, "other"))))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == name


def test_without_a_chat_template_the_request_is_a_completion() -> None:
    without = replace(banner(), loaded={**LOADED, "takes_chats": False})
    command = shlex.split(without.curl(show_key=False).replace("\\\n", ""))
    assert command[1].endswith("/v1/completions")
    assert json.loads(command[-1])["prompt"]
    assert any(fact.startswith("chats: the checkpoint has no chat template") for _, fact in without.facts())


def test_the_key_is_in_the_request_on_a_terminal_and_never_in_a_log() -> None:
    keyed = banner(api_keys=("s3 'cret", "second"))
    assert "Authorization: Bearer s3 'cret" in pasted(printed(keyed, terminal=True))
    assert "cret" not in printed(keyed)
    assert '"Authorization: Bearer $API_KEY"' in printed(keyed)
    assert "Authorization" not in printed(banner(), terminal=True)


@pytest.mark.parametrize(
    ("host", "url", "local"),
    [
        ("127.0.0.1", "http://127.0.0.1:1", True),
        ("localhost", "http://localhost:1", True),
        ("::1", "http://[::1]:1", True),
        ("0.0.0.0", "http://127.0.0.1:1", False),
        ("::", "http://[::1]:1", False),
        ("192.168.0.2", "http://192.168.0.2:1", False),
        ("studio.local", "http://studio.local:1", False),
    ],
)
def test_the_address_is_one_a_client_here_can_use(host: str, url: str, local: bool) -> None:
    assert local_url(host, 1) == url
    assert is_local(host) is local


def test_an_open_server_says_so() -> None:
    assert "open to the" in printed(banner(host="0.0.0.0"))
