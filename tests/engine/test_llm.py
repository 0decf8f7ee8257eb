"""The Python API: the same replies as a plain loop, in the order asked, with errors that name the field."""

import asyncio
import re
import sys

import pytest
from PIL import Image

import vllm_mlx
from tests.support.engine_driver import plain_loop
from tests.support.rows import row
from vllm_mlx import LLM, Guide, Regex, SamplingParams
from vllm_mlx.core.errors import ConfigError, ContextLengthExceeded, InvalidImage, InvalidParameter
from vllm_mlx.core.events import FinishReason
from vllm_mlx.llm import MAX_TOKENS

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def llm(path):
    switch_s = sys.getswitchinterval()
    with LLM(path, memory_budget_bytes=1 << 30, max_model_len=2048) as llm:
        assert sys.getswitchinterval() == switch_s, "a setting of the process that is not ours to change"
        yield llm


def test_token_ids_go_on_as_a_plain_loop_does(llm, path):
    prompts = [[5, 6, 7], [9] * 30]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = [logprob.token_id for logprob in output.outputs[0].logprobs]
        assert ids == plain_loop(path, prompt, 8)[0][: len(ids)]
        assert output.num_prompt_tokens == len(prompt)
        assert output.outputs[0].usage.completion_tokens == 8
        assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_one_prompt_or_several(llm):
    [alone] = llm.generate("Hello world", GREEDY)
    [ids] = llm.generate([5, 6, 7], GREEDY)
    together = llm.generate(["Hello world", [5, 6, 7]], GREEDY)
    assert [output.text for output in together] == [alone.text, ids.text]
    assert llm.generate([], GREEDY) == []


def test_chat_one_conversation_or_several(llm):
    conversations = [[{"role": "user", "content": text}] for text in ("hi", "what is this?")]
    together = llm.chat(conversations, GREEDY)
    assert [llm.chat(conversation, GREEDY)[0].text for conversation in conversations] == [o.text for o in together]
    assert together[0].outputs[0].usage.prompt_tokens > 1


def test_chat_takes_the_fields_of_a_chat_completion(llm):
    question = [{"role": "user", "content": "hi"}]
    plain = llm.chat(question, GREEDY)[0]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    assert llm.chat(question, GREEDY, tools=[tool])[0].num_prompt_tokens > plain.num_prompt_tokens
    off = llm.chat(question, GREEDY, chat_template_kwargs={"enable_thinking": False})[0]
    assert off.num_prompt_tokens != plain.num_prompt_tokens


def test_n_replies_with_seeds(llm):
    sampling = SamplingParams(temperature=1, max_tokens=8, seed=4, n=3)
    [first], [second] = llm.generate("Hello", sampling), llm.generate("Hello", sampling)
    assert [reply.text for reply in first.outputs] == [reply.text for reply in second.outputs]
    assert len({reply.text for reply in first.outputs}) > 1


@pytest.mark.parametrize(
    ("call", "error", "param"),
    [
        (lambda llm: llm.generate([[5, 99999]]), InvalidParameter, "prompt"),
        (lambda llm: llm.generate([[5] * 3000]), ContextLengthExceeded, "prompt"),
        (lambda llm: llm.chat([{"role": "nobody", "content": "x"}]), InvalidParameter, None),
        (lambda llm: llm.generate("x", SamplingParams(temperature=-1)), InvalidParameter, "temperature"),
        (lambda llm: llm.generate("x", SamplingParams(top_k=1.5)), InvalidParameter, "top_k"),
        (lambda llm: llm.generate("x", SamplingParams(top_p="a")), InvalidParameter, "top_p"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], top_k=1.5), InvalidParameter, "top_k"),
        (lambda llm: llm.generate("x", SamplingParams(logit_bias={5000: 1.0})), InvalidParameter, "logit_bias"),
    ],
)
def test_wrong_input_names_its_field_and_disturbs_nobody(llm, call, error, param):
    before = llm.generate("Hello world", GREEDY)[0].text
    with pytest.raises(error) as caught:
        call(llm)
    assert param is None or caught.value.param == param
    assert llm.generate("Hello world", GREEDY)[0].text == before


def test_wrong_settings():
    with pytest.raises(TypeError, match="no setting speed"):
        LLM("demo", speed=9)
    with pytest.raises(ConfigError):
        LLM("./nowhere")


@row("S3-1")
def test_a_guide_and_a_budget_of_sampling_params(llm):
    guide = Guide(form=Regex("[0-9]{3}"))
    [output] = llm.generate("One, two,", SamplingParams(guide=guide, temperature=0, max_tokens=20))
    assert re.fullmatch("[0-9]{3}", output.text)
    [output] = llm.generate("Once <think>", SamplingParams(guide=guide, thinking_token_budget=4, max_tokens=40))
    assert re.fullmatch(r"(?s).*</think>\n{0,2}[0-9]{3}", output.text)


def test_half_a_surrogate_pair_becomes_a_replacement_character(llm):
    cut, whole = llm.chat([[{"role": "user", "content": text}] for text in ("cut \ud83d", "cut \ufffd")], GREEDY)
    assert cut.text == whole.text and cut.num_prompt_tokens == whole.num_prompt_tokens
    cut, whole = llm.generate(["cut \ud83d", "cut \ufffd"], GREEDY)
    assert cut.text == whole.text and cut.num_prompt_tokens == whole.num_prompt_tokens


def test_without_a_limit_a_text_ends_after_256_tokens(llm):
    [output] = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, ignore_eos=True))
    assert output.outputs[0].usage.completion_tokens == MAX_TOKENS == 256


def test_a_text_in_the_place_of_a_conversation_is_refused(llm):
    with pytest.raises(TypeError, match="list of messages"):
        llm.chat("hello")


def test_the_package_shows_what_it_has():
    assert {"LLM", "SamplingParams", "Guide"} <= set(dir(vllm_mlx))


def test_what_the_python_interface_does_not_do_is_said(llm: LLM) -> None:
    with pytest.raises(TypeError, match="leave `stream` out"):
        llm.chat([{"role": "user", "content": "a"}], stream=True)
    with pytest.raises(TypeError, match="no setting memory_budget; similar ones: memory_budget_bytes"):
        LLM("demo", memory_budget=1)


def said(output) -> list[tuple]:
    """The replies without their usage, which depends on what was cached."""
    return [(each.text, each.reasoning, each.token_ids, each.finish_reason) for each in output.outputs]


def test_a_reply_in_pieces_is_the_whole_reply(llm: LLM) -> None:
    [whole] = llm.generate("Hello world", GREEDY)
    *pieces, last = llm.stream("Hello world", GREEDY)
    assert "".join(piece.text for piece in pieces) == whole.text == last.output.text
    assert said(last.output) == said(whole)
    conversation = [{"role": "user", "content": "hi"}]
    [answer] = llm.chat(conversation, GREEDY)

    async def pieces_of() -> list:
        return [piece async for piece in llm.stream_async(conversation, GREEDY)]

    *pieces, last = asyncio.run(pieces_of())
    assert "".join(piece.text + piece.reasoning for piece in pieces) == answer.text + answer.outputs[0].reasoning
    assert said(last.output) == said(answer)
    with pytest.raises(TypeError, match="leave out temperature"):
        next(llm.stream("Hello", temperature=0))
    with pytest.raises(TypeError, match="leave `n` out"):
        next(llm.stream("Hello", SamplingParams(n=2)))


def test_a_stream_that_is_left_ends_its_reply(llm: LLM) -> None:
    pieces = llm.stream("Hello world", SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True))
    next(pieces)
    pieces.close()
    assert llm.generate("Hello world", GREEDY)[0].text


def test_an_output_has_the_fields_of_vllm(llm: LLM) -> None:
    [output] = llm.generate([5, 6, 7], GREEDY)
    tokenizer = llm.get_tokenizer()
    assert output.prompt_token_ids == [5, 6, 7] and output.prompt == tokenizer.decode([5, 6, 7])
    assert len(output.outputs[0].token_ids) == 8
    assert llm.generate("Hello world", GREEDY)[0].prompt == "Hello world"
    assert "hi" in llm.chat([{"role": "user", "content": "hi"}], GREEDY)[0].prompt


def test_more_prompts_than_may_wait_are_answered_in_turn(path) -> None:
    with LLM(path, memory_budget_bytes=1 << 30, max_model_len=512, max_queue=2) as small:
        outputs = small.generate(["Hello"] * 9, SamplingParams(temperature=0, max_tokens=2))
    assert len({output.text for output in outputs}) == 1 and len(outputs) == 9


def test_words_of_vllm_are_understood_or_answered() -> None:
    assert SamplingParams(stop="zo").stop == ("zo",) and SamplingParams(top_k=-1).top_k == 0
    with pytest.raises(TypeError, match="gpu_memory_utilization: write `memory_budget_bytes`"):
        LLM("demo", gpu_memory_utilization=0.9)
    with pytest.raises(TypeError, match="enforce_eager: nothing is needed here"):
        LLM("demo", enforce_eager=True)


def test_images_are_read_in_process(tmp_path) -> None:
    picture = Image.new("RGB", (64, 64), "red")
    picture.save(tmp_path / "a b.png")
    places = [picture, tmp_path / "a b.png", str(tmp_path / "a b.png"), (tmp_path / "a b.png").as_uri()]
    with LLM("demo", memory_budget_bytes=2 << 30) as demo:
        for url in places:
            parts = [{"type": "text", "text": "What colour is the square?"}, {"type": "image_url", "image_url": url}]
            [output] = demo.chat([{"role": "user", "content": parts}], temperature=0, max_tokens=40)
            assert "red" in output.text
        with pytest.raises(InvalidImage, match="cannot be read"):
            demo.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "none.png"}}]}])
