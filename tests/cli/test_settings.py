"""Flag over environment over file over default, and what is said about a value that cannot be."""

import ast
import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from tests.project.sources import PACKAGE
from tests.support.commands import call
from tests.support.rows import row
from vllm_mlx.cli.options import load_settings, unknown_variables
from vllm_mlx.cli.serve import accepted
from vllm_mlx.cli.settings import GROUPS, AllSettings, flag_name, settings_fields
from vllm_mlx.core.config import EngineConfig, MediaConfig, ReasoningStrings
from vllm_mlx.core.errors import ConfigError, setting
from vllm_mlx.server.config import ServerConfig


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "my config.toml"


def refusal(flags: dict[str, object], config_file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        settings = load_settings(flags, config_file)
        settings.engine_config()
        settings.server_config()
    assert "\n" not in caught.value.message
    return caught.value.message


def test_flag_wins_over_environment_over_file_over_default(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings({}).port == 8000
    config_file.write_text("port = 1111\nmax-num-seqs = 3\n")
    assert load_settings({}, config_file).port == 1111
    monkeypatch.setenv("VLLM_MLX_PORT", "2222")
    assert load_settings({}, config_file).port == 2222
    assert load_settings({"port": "3333"}, config_file).port == 3333
    assert load_settings({"port": "3333"}, config_file).max_num_seqs == 3


def test_the_file_in_the_home_folder_is_read_unless_another_is_named(config_file: Path) -> None:
    own = Path("~/.config/vllm-mlx/config.toml").expanduser()
    own.parent.mkdir(parents=True)
    own.write_text("port = 1111\n")
    assert load_settings({}).port == 1111
    config_file.write_text("max_num_seqs = 3\n")
    assert load_settings({}, config_file).port == 8000


def test_several_values_from_flags_a_variable_and_a_file(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings({"served_model_name": ["a", "b"]}).served_model_name == ("a", "b")
    config_file.write_text('served_model_name = ["c", "d"]\ncors_origin = "*"\n')
    assert load_settings({}, config_file).served_model_name == ("c", "d")
    assert load_settings({}, config_file).cors_origin == ("*",)
    monkeypatch.setenv("VLLM_MLX_SERVED_MODEL_NAME", "e, f")
    assert load_settings({}, config_file).served_model_name == ("e", "f")
    monkeypatch.setenv("VLLM_MLX_MODELS_FROM", "hub, /models")
    assert load_settings({}).models_from == ("hub", "/models")


def test_an_empty_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MLX_PORT", "")
    assert load_settings({}).port == 8000


def test_a_bad_value_is_named_after_where_it_stands(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_file.write_text("port = 99999\n")
    assert refusal({}, config_file).startswith(f"`port` in {config_file} must be at most 65535, got 99999.")
    monkeypatch.setenv("VLLM_MLX_PORT", "none")
    assert refusal({}, config_file).startswith("VLLM_MLX_PORT must be a whole number")
    assert refusal({"port": "none"}, config_file).startswith("--port must be a whole number")
    assert refusal({"port": "-1"}, config_file) == "--port must be at least 0, got '-1'."


DRAFT_MODEL = '{"method": "mtp", "model": "org/head"}'
NO_DRAFTS = {  # what no drafts can be made with, in the form of vLLM
    '{"method": "eagle3", "num_speculative_tokens": 3}': "the method eagle3 is not supported: this server drafts",
    '{"method": ["eagle"]}': "the method ['eagle'] is not supported",
    '{"method": "mtp", "model": 3}': "`model` must be a text",
    '{"model": "org/small", "num_speculative_tokens": 3}': "the model org/small is not supported: this server",
    '{"method": "ngram", "disable_by_batch_size": 4}': "`disable_by_batch_size` is not supported",
    '{"method": "ngram", "num_speculative_tokens": 8}': "`num_speculative_tokens`: it must be auto or a whole",
    "ngram": "it is not JSON",
    "[1]": "it must be an object",
}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"memory_budget": "24XB"}, "--memory-budget: give bytes, such as 24GB"),
        ({"log_level": "loud"}, "--log-level must be 'debug', 'info'"),
        ({"max_num_seqs": "0"}, "--max-num-seqs must be greater than 0, got '0'."),
        ({"max_model_len": "1"}, "--max-model-len must be at least 2"),
        ({"temperature": "3"}, "--temperature: `temperature` must be at most 2"),
        ({"top_p": "1.5"}, "--top-p: `top_p` must be at most 1"),
        ({"max_tokens": "0"}, "--max-tokens: `max_tokens` must be at least 1"),
        ({"chat_template": "no/such"}, "--chat-template: cannot read the template file no/such: No such file"),
        ({"drain_s": "-1"}, "--drain-s must be at least 0"),
        ({"num_draft_tokens": "x"}, "--num-draft-tokens: it must be auto or a whole number from 0 to 7, got 'x'."),
        ({"num_draft_tokens": "8"}, "--num-draft-tokens: it must be auto or a whole number from 0 to 7, got '8'."),
        ({"num_draft_tokens": "1.5"}, "--num-draft-tokens: it must be auto or a whole number from 0 to 7, got '1.5'."),
        ({"cache_disk": "20"}, "--cache-disk: give bytes, such as 100GB, or 0, got '20'."),
        ({"cache_disk": "half"}, "--cache-disk: give bytes, such as 100GB, or 0, got 'half'."),
        ({"cache_disk_daily": "-1GB"}, "--cache-disk-daily: give bytes, such as 100GB, or 0, got '-1GB'."),
        ({"cache_disk": "1GB", "prefix_cache": "false"}, "--cache-disk keeps the prefix cache on disk"),
        ({"cache_disk": "1GB", "repeatable": "true"}, "with --repeatable there is no prefix cache"),
        ({"limit_mm_per_prompt": "4"}, "--limit-mm-per-prompt: write image=4"),
        ({"limit_mm_per_prompt": "image=4,audio=1"}, "does not take audio"),
        ({"limit_mm_per_prompt": '{"image": 1.5}'}, "write image=4"),
        ({"limit_mm_per_prompt": '{"image": '}, "write image=4"),
        ({"limit_mm_per_prompt": "{}"}, "write image=4"),
        ({"max_video_bytes": "0"}, "--max-video-bytes must be greater than 0"),
        ({"max_image_bytes": "50%"}, "give bytes, such as 20MB"),
        ({"max_image_bytes": "20XB"}, "give bytes, such as 20MB"),
        ({"max_image_bytes": "-1"}, "give bytes, such as 20MB"),
        ({"max_image_bytes": "0"}, "--max-image-bytes must be greater than 0"),
        ({"max_image_pixels": "999999999"}, "--max-image-pixels must be at most"),
        ({"max_request_pixels": "5"}, "--max-request-pixels must be at least --max-image-pixels"),
        ({"media_timeout_s": "0"}, "--media-timeout-s must be greater"),
        ({"max_media_redirects": "-1"}, "--max-media-redirects must be at least 0"),
        ({"web_search": "localhost:8080"}, "--web-search localhost:8080 is not an address: write it as http://"),
        ({"web_search": "ftp://a"}, "--web-search ftp://a is not an address"),
        ({"web_search": "http://["}, "--web-search http://[ is not an address"),
        ({"web_search": "http://a:99999"}, "--web-search http://a:99999 is not an address"),
        ({"web_search": "http://a b"}, "--web-search http://a b is not an address"),
        ({"cors_origin": ["https://a.com/"]}, "--cors-origin https://a.com/ is not an origin as browsers send it"),
        ({"cors_origin": ["https://b.com", "a.com"]}, "--cors-origin a.com is not an origin"),
        ({"allowed_host": ["http://a.com"]}, "--allowed-host http://a.com is not a host name"),
        ({"media_content_type": ["png"]}, "--media-content-type png is not a content type such as image/png"),
        ({"api_key": ["s3cret\n"]}, "--api-key: a key must not contain line breaks, or begin or end with a space."),
        ({"reasoning_config": "{"}, "--reasoning-config: it is not JSON"),
        ({"reasoning_config": "[]"}, "--reasoning-config: it must be an object with"),
        ({"reasoning_config": "{}"}, "--reasoning-config: `reasoning_start_str` and `reasoning_end_str` must"),
        ({"reasoning_config": '{"reasoning_start_str": "<a>"}'}, "`reasoning_end_str` must both be texts"),
        ({"reasoning_config": '{"start": "<a>"}'}, "--reasoning-config: it must be an object with"),
        *(({"prompts": text}, "--prompts") for text in ("{", "[]", '"query"', '{"query": 1}')),
        *(({"speculative_config": given}, f"--speculative-config: {words}") for given, words in NO_DRAFTS.items()),
        ({"draft_model": "org/head", "num_draft_tokens": "0"}, "--num-draft-tokens 0 turns drafts off, and --draft"),
        ({"draft_model": "org/head", "repeatable": True}, "--repeatable turns drafts off, and --draft-model needs"),
        ({"draft_model": "org/other", "speculative_config": DRAFT_MODEL}, "--draft-model and --speculative-config"),
    ],
)
def test_a_bad_value_is_refused_by_name(flags: dict[str, object], words: str) -> None:
    message = refusal(flags)
    assert words in message and "s3cret" not in message


def test_an_unknown_key_is_refused_with_the_nearest_setting(config_file: Path) -> None:
    config_file.write_text("max_num_seq = 3\n")
    message = refusal({}, config_file)
    assert message == f"Unknown setting `max_num_seq` in {config_file}. Did you mean `max_num_seqs`?"
    config_file.write_text("[server]\nport = 1\n")
    assert refusal({}, config_file) == f"Unknown setting `server` in {config_file}."


def test_a_config_file_that_cannot_be_read_is_said(config_file: Path) -> None:
    assert refusal({}, config_file) == f"Cannot read the config file {config_file}: No such file or directory."
    config_file.write_bytes(b"\xff")
    assert refusal({}, config_file) == f"Cannot read the config file {config_file}: it is not UTF-8 text."
    config_file.write_text("port 8000")
    assert refusal({}, config_file).startswith(f"The config file {config_file} is not valid TOML: ")


def test_a_misspelt_variable_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MLX_PROT", "1")
    monkeypatch.setenv("VLLM_MLX_CONFIG", "f.toml")
    monkeypatch.setenv("VLLM_MLX_HOST", "localhost")
    [line] = unknown_variables()
    assert line.endswith("VLLM_MLX_PROT is not a setting and has no effect. Did you mean `VLLM_MLX_PORT`?")


@row("S4-36")
def test_the_engine_gets_every_setting_it_has(tmp_path: Path) -> None:
    template = tmp_path / "chat template.jinja"
    template.write_text("{{ messages }}")
    given = {
        "model": "m",
        "max_num_seqs": 5,
        "max_queue": 6,
        "max_prepare_s": 9,
        "watchdog_s": 9,
        "max_queue_s": 7,
        "max_request_s": 8,
        "max_model_wait_s": 12,
        "max_model_len": 100,
        "max_stall_ms": 7.5,
        "max_prefill_chunk": 64,
        "memory_budget": "2GB",
        "prefix_cache": False,
        "repeatable": True,
        "cache_memory": "1GB",
        "snapshot_every": 100,
        "num_draft_tokens": "3",
        "cache_reasoning": "keep",
        "idle_prefill": "off",
        "enable_thinking": False,
        "text_only": True,
        "reasoning_parser": "r",
        "tool_call_parser": "t",
        "tool_grammar": "strict",
        "undeclared_calls": "call",
        "default_thinking_token_budget": 5,
        "max_silent_tokens": 500,
        "reasoning_config": '{"reasoning_start_str": "<a>", "reasoning_end_str": "</a>"}',
        "chat_template": str(template),
        "trust_remote_code": True,
        "revision": "v1",
        "temperature": 0.5,
        "max_tokens": 9,
        "media_root": str(tmp_path),
        "max_pixels": 1000,
        "wired": "weights",
        "keep_awake": False,
        "task": "embedding",
        "pooling": "cls",
        "normalize": True,
        "prompts": {"query": "query: "},
    }
    config = load_settings(given).engine_config()
    disk = {
        "idle_unload_s": 60, "cache_disk": "100GB", "cache_dir": "d", "cache_disk_daily": "2GB",
        "draft_model": "org/head",
    }  # fmt: skip
    kept = load_settings(disk).engine_config()  # without a prefix cache, nothing could be kept
    assert load_settings({"tensor_parallel_size": 2}).engine_config().tensor_parallel_size == 2
    default = EngineConfig(model="demo")
    unchanged = [
        f.name
        for f in dataclasses.fields(EngineConfig)
        if getattr(config, f.name) == getattr(kept, f.name) == getattr(default, f.name)
    ]
    assert unchanged == ["tensor_parallel_size"]
    assert (kept.cache_disk_bytes, kept.cache_disk_daily_bytes) == (100 * 10**9, 2 * 10**9)
    assert config.memory_budget_bytes == 2 * 10**9
    assert config.chat_template == "{{ messages }}"
    assert (config.defaults.temperature, config.defaults.max_tokens, config.defaults.top_p) == (0.5, 9, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("idle_unload_s", 60), ("cache_disk", "1GB"), ("num_draft_tokens", 3), ("draft_model", "org/head")],
)
def test_what_a_model_on_several_macs_does_without_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{flag_name(name)} does not work with --tensor-parallel-size. Leave one"):
        load_settings({"tensor_parallel_size": 2, name: value}).engine_config()
    load_settings({"tensor_parallel_size": 2, "num_draft_tokens": 0, "cache_disk": "0"}).engine_config()


@row("S1-5")
def test_another_name_for_keeping_reasoning_cached() -> None:
    assert load_settings({"cache_thinking_tokens": True}).engine_config().cache_reasoning == "keep"
    with pytest.raises(ConfigError, match="--cache-thinking-tokens"):
        load_settings({"cache_thinking_tokens": True, "cache_reasoning": "drop"}).engine_config()


def test_the_server_gets_what_is_its_own() -> None:
    given = {"separate_reasoning": False, "keep_alive_s": 3, "max_body": "1MiB", "served_model_name": ["m"]}
    config = load_settings({**given, "messages_thinking": "always"}).server_config()
    assert (config.separate_reasoning, config.keep_alive_s, config.max_body_bytes) == (False, 3, 1 << 20)
    assert config.messages_thinking == "always"
    plain = load_settings({"served_model_name": ["m"]})
    assert plain.server_config() == ServerConfig(models=plain.catalogue())
    assert plain.catalogue().names == ("m",)


def test_what_is_said_of_images_reaches_the_engine() -> None:
    given: dict[str, object] = {
        "limit_mm_per_prompt": '{"image": 3, "video": 0, "document": 5}',
        "document_pages": "text",
        "max_document_bytes": "4MB",
        "max_document_pages": "6",
        "max_document_chars": "7",
        "max_document_s": "8",
        "max_image_bytes": "2MB",
        "max_video_bytes": "3MB",
        "max_video_pixels": "1500",
        "max_decode_s": "1",
        "max_image_pixels": "1000",
        "max_request_pixels": "2000",
        "media_timeout_s": "2.5",
        "max_media_redirects": "0",
        "media_content_type": ["image/png"],
        "media_root": "/tmp",
        "allow_private_media": True,
        "media_cache_bytes": "0",
    }
    media, default = load_settings(given).engine_config().media, MediaConfig()
    assert all(getattr(media, field.name) != getattr(default, field.name) for field in dataclasses.fields(MediaConfig))
    assert (media.max_images, media.max_image_bytes, media.media_cache_bytes) == (3, 2_000_000, 0)
    assert (media.max_videos, media.max_video_bytes) == (0, 3_000_000)
    assert (media.max_documents, media.max_document_bytes, media.max_document_s) == (5, 4_000_000, 8)
    assert load_settings({"limit_mm_per_prompt": "video=2"}).engine_config().media.max_images == default.max_images


def test_addresses_origins_and_names_in_all_their_forms_are_taken() -> None:
    origins = ("*", "null", "https://a.com", "http://localhost:3000", "http://[::1]:80", "tauri://localhost")
    for url in ("http://127.0.0.1:8080", "https://a.com/mcp", "http://[::1]/"):
        flags = {"web_search": url, "cors_origin": list(origins), "allowed_host": ["*", "a.com", "a.com:80", "::1"]}
        config = load_settings({**flags, "media_content_type": ["*", "image/*", "application/pdf"]}).server_config()
        assert (config.web_search, config.cors_origins) == (url, origins)


@pytest.mark.parametrize("name", ["media_root", "record_requests", "cache_dir", "host", "model", "api_key", "port"])
def test_an_empty_value_as_of_a_variable_that_is_not_set_is_refused(name: str) -> None:
    """An empty path would be the folder in which the command runs."""
    for value in ("", " ", [""]):
        if isinstance(value, list) == (name == "api_key"):
            place = "MODEL" if name == "model" else flag_name(name)
            assert f"{place}: it is empty; write a value, or leave it out" in refusal({name: value})


def test_each_setting_is_declared_once_and_listed_once() -> None:
    names = [name for name, _, _ in settings_fields()]
    assert sorted([*names, "models"]) == sorted(AllSettings.model_fields)  # the list is a table of the file only
    documented = {name for group in GROUPS for name, field in group.__pydantic_fields__.items() if field.description}
    assert documented <= set(names)
    assert [name for name, field, _ in settings_fields() if not field.description] == []


@pytest.mark.parametrize("name", ["max_queue", "media_timeout_s", "max_tools", "slow_client_s"])
def test_a_value_out_of_range_is_named_after_where_it_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"VLLM_MLX_{name.upper()}", "-1")
    assert refusal({}).startswith(f"VLLM_MLX_{name.upper()} must be ")


def test_a_group_built_in_python_names_its_field() -> None:
    with pytest.raises(ConfigError, match=r"^`max_num_seqs` must be greater than 0\.$"):
        EngineConfig(model="m", max_num_seqs=0)


def modules_below_the_commands() -> list[Path]:
    return [file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] != "cli"]


def test_only_the_commands_spell_flags() -> None:
    flag = re.compile(r"(?<![\w-])--[a-z]")
    lines = ((file, line) for file in modules_below_the_commands() for line in file.read_text().splitlines())
    assert [f"{file.relative_to(PACKAGE)}: {line}" for file, line in lines if flag.search(line)] == []


def test_messages_name_settings_that_exist() -> None:
    named = set()
    for file in modules_below_the_commands():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setting":
                texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
                named |= {text for text in texts if text not in ("image", "_s")}  # not a name, but what is compared
    assert len(named) > 30
    assert named <= AllSettings.model_fields.keys()
    assert setting("max_queue") == flag_name("max_queue")


def test_without_settings_the_engine_runs_on_its_own_defaults() -> None:
    assert AllSettings().engine_config() == EngineConfig(model="demo")


def test_a_share_of_memory_is_of_this_machine() -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert load_settings({"memory_budget": "50%"}).engine_config().memory_budget_bytes == machine // 2


def test_a_template_may_be_given_as_text() -> None:
    assert load_settings({"chat_template": "{% for m in messages %}{% endfor %}"}).chat_template is not None


def test_served_names_are_those_given_or_the_models(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny 1B"
    folder.mkdir()
    assert load_settings({"model": f"{folder}/"}).served_model_names == ("Tiny 1B",)
    assert load_settings({"model": "org/tiny"}).served_model_names == ("org/tiny",)
    assert load_settings({}).served_model_names == ("demo",)
    assert load_settings({"served_model_name": ["x", "y"]}).served_model_names == ("x", "y")


def test_keys_do_not_show_when_settings_are_printed_or_refused() -> None:
    settings = load_settings({"api_key": ["s3cret"]})
    assert "s3cret" not in repr(settings)
    assert settings.api_keys == ("s3cret",)


@pytest.mark.parametrize("prefix", ["reasoning", "think"])
def test_strings_of_thoughts_go_by_both_names(prefix: str) -> None:
    given = json.dumps({f"{prefix}_start_str": "<a>", f"{prefix}_end_str": "Enough.</a>"})
    assert load_settings({"reasoning_config": given}).engine_config().reasoning_config == ReasoningStrings(
        "<a>", "Enough.</a>"
    )


@pytest.mark.parametrize("given", ['{"query": "q: ", "document": ""}', {"query": "q: ", "document": ""}])
def test_prompts_are_json_or_a_table(given: object) -> None:
    read = load_settings({"prompts": given}).engine_config().prompts
    assert read == {"query": "q: ", "document": ""}


def test_the_number_of_drafts_is_read_from_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_file = tmp_path / "config.toml"
    assert load_settings({}).engine_config().num_draft_tokens == "auto"
    for written, number in (("0", 0), ('"7"', 7), ('"auto"', "auto")):
        config_file.write_text(f"num_draft_tokens = {written}\n")
        assert load_settings({}, config_file).engine_config().num_draft_tokens == number
    monkeypatch.setenv("VLLM_MLX_NUM_DRAFT_TOKENS", "AUTO")
    assert load_settings({}).engine_config().num_draft_tokens == "auto"
    assert load_settings({"num_draft_tokens": "5"}).engine_config().num_draft_tokens == 5
    with pytest.raises(ConfigError, match="`num_draft_tokens`: it must be auto or a whole number from 0 to 7"):
        EngineConfig(model="m", num_draft_tokens=8)


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 3}', 3),
        ('{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": null}', 5),
        ('{"model": "[ngram]", "num_speculative_tokens": 2}', 2),
        ('{"num_speculative_tokens": 7}', 7),
        ('{"method": "ngram"}', "auto"),
        ({"method": "ngram", "num_speculative_tokens": 3}, 3),
        ('{"method": "mtp", "num_speculative_tokens": 1}', 1),
        ('{"method": "qwen3_5_mtp", "model": "org/head"}', "auto"),
    ],
)
def test_the_number_of_drafts_in_the_form_of_vllm(given: object, number: object) -> None:
    settings = load_settings({"speculative_config": given})
    assert settings.engine_config().num_draft_tokens == number
    again = load_settings({"speculative_config": settings.speculative_config, "num_draft_tokens": str(number)})
    assert again.engine_config().num_draft_tokens == number


def test_two_numbers_of_drafts_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MLX_NUM_DRAFT_TOKENS", "0")
    message = refusal({"speculative_config": '{"num_speculative_tokens": 3}'})
    assert message == "--num-draft-tokens and --speculative-config contradict each other. Leave one out."


def test_a_draft_model_is_read_from_both_forms() -> None:
    settings = load_settings({"speculative_config": DRAFT_MODEL})
    assert settings.engine_config().draft_model == "org/head"
    settings = load_settings({"speculative_config": '{"method": "mtp"}', "draft_model": "org/head"})
    assert settings.engine_config().draft_model == "org/head"


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("/nowhere/head", "No folder /nowhere/head"),
        ("demo", "holds no mtp.* tensors. Use a conversion that keeps them."),
    ],
)
def test_a_draft_model_that_cannot_be_used_is_refused_with_the_reason(named: str, words: str) -> None:
    result = call("serve", "demo", "--draft-model", named, "--port", "0")
    *_, message = result.stderr.splitlines()
    assert result.returncode == 1 and f"--draft-model {named} cannot be used: " in message and words in message


def test_lengths_of_ngrams_are_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    accepted(load_settings({"speculative_config": '{"num_speculative_tokens": 3, "prompt_lookup_max": 4}'}))
    assert "`prompt_lookup_max` of --speculative-config has no effect" in caplog.text
    assert "prompt_lookup_min" not in caplog.text
