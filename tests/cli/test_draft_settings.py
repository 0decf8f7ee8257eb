"""How many drafts are verified: `--num-draft-tokens`, the same in vLLM's JSON, and what is refused by name."""

from pathlib import Path

import pytest

from tests.support.commands import call
from vllm_mlx.cli.options import load_settings
from vllm_mlx.cli.serve import accepted
from vllm_mlx.core.config import EngineConfig
from vllm_mlx.core.errors import ConfigError


def refused(**flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(flags).engine_config()
    return caught.value.message


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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('{"method": "eagle3", "num_speculative_tokens": 3}', "the method eagle3 is not supported: this server drafts"),
        ('{"method": ["eagle"]}', "the method ['eagle'] is not supported"),
        ('{"method": "mtp", "model": 3}', "`model` must be a text"),
        ('{"model": "org/small", "num_speculative_tokens": 3}', "the model org/small is not supported: this server"),
        ('{"method": "ngram", "disable_by_batch_size": 4}', "`disable_by_batch_size` is not supported"),
        ('{"method": "ngram", "num_speculative_tokens": 8}', "`num_speculative_tokens`: it must be auto or a whole"),
        ("ngram", "it is not JSON"),
        ("[1]", "it must be an object"),
    ],
)
def test_what_drafts_cannot_be_made_with_is_named(given: str, words: str) -> None:
    assert refused(speculative_config=given).startswith(f"--speculative-config: {words}")


def test_two_numbers_of_drafts_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MLX_NUM_DRAFT_TOKENS", "0")
    message = refused(speculative_config='{"num_speculative_tokens": 3}')
    assert message.startswith("--num-draft-tokens and --speculative-config contradict each other.")


def test_a_draft_model_is_read_from_both_forms() -> None:
    settings = load_settings({"speculative_config": '{"method": "mtp", "model": "org/head"}'})
    assert settings.engine_config().draft_model == "org/head"
    settings = load_settings({"speculative_config": '{"method": "mtp"}', "draft_model": "org/head"})
    assert settings.engine_config().draft_model == "org/head"
    message = refused(speculative_config='{"method": "mtp", "model": "org/head"}', draft_model="org/other")
    assert message.startswith("--draft-model and --speculative-config contradict each other.")


@pytest.mark.parametrize(("flags", "cause"), [({"num_draft_tokens": "0"}, "--num-draft-tokens 0"),
                                              ({"repeatable": True}, "--repeatable")])  # fmt: skip
def test_a_draft_model_is_refused_where_drafts_are_off(flags: dict[str, object], cause: str) -> None:
    assert refused(draft_model="org/head", **flags).startswith(f"{cause} turns drafts off, and --draft-model needs")


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
