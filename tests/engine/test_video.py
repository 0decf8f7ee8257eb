"""Videos, batched, in chunks, resumed and taken in pieces: the tokens that mlx-vlm's own single stream says of them."""

import pytest

from vllm_mlx.core.errors import Unsupported

from .vision_harness import Shot, VisionModel, full

NUM_TOKENS = 10
CONVERSATIONS = [
    (["What happens here? ", Shot(1), "Say it."],),
    ([Shot(2, num_frames=5), " and then ", Shot(3, num_frames=2), "this?"],),
    (["hello world"],),
    (["And here? ", Shot(1), "Describe it."], ["a test"], [Shot(4), "And now?"]),
]


@pytest.fixture(
    scope="module",
    params=["qwen3_vl", *map(full, ("qwen3_5", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe"))],
)
def model(request, checkpoint):
    return VisionModel(checkpoint(f"vision:{request.param}"))


@pytest.fixture(scope="module")
def expected(model):
    return [model.reply(*turns, max_tokens=NUM_TOKENS) for turns in CONVERSATIONS]


@pytest.fixture(scope="module")
def prompts(model):
    return [model.prompt(*turns) for turns in CONVERSATIONS]


def test_a_family_whose_videos_are_not_served_refuses_them(checkpoint):
    with pytest.raises(Unsupported, match="takes no video"):
        VisionModel(checkpoint("vision:pixtral")).prompt(["What happens here? ", Shot(1)])


def test_the_prompts_are_the_librarys(model, prompts):
    for turns, prompt in zip(CONVERSATIONS, prompts, strict=True):
        assert list(prompt.token_ids) == model.reference_inputs(*turns)["input_ids"].reshape(-1).tolist()


@pytest.mark.full
def test_batched_with_text_and_in_chunks_they_give_the_librarys_tokens(model, expected, prompts):
    for settings in ({}, {"max_prefill_chunk": 16}):
        driver = model.driver(prefix_cache=False, **settings)
        assert driver.generate(prompts, max_tokens=NUM_TOKENS) == expected


@pytest.mark.full
def test_a_cached_video_gives_the_librarys_tokens_and_the_tower_sees_each_piece_once(model, expected, prompts):
    driver = model.driver()
    for _ in range(2):
        assert [driver.generate([prompt], max_tokens=NUM_TOKENS)[0] for prompt in prompts] == expected
    pieces = {item.digest for prompt in prompts for item in prompt.media}
    assert driver.engine.report().images["encoded"] == len(pieces)


def test_a_new_question_resumes_behind_the_video(model):
    turns = (["hello ", Shot(1), " What happens here?"],)
    asked = (*turns, ["a test"], ["Describe it in detail."])
    driver = model.driver()
    driver.generate([model.prompt(*turns)], max_tokens=NUM_TOKENS)
    prompt = model.prompt(*asked)
    seq_id = driver.add(prompt, NUM_TOKENS)
    driver.run()
    assert driver.replies[seq_id].token_ids == model.reply(*asked, max_tokens=NUM_TOKENS)
    assert driver.seqs[seq_id].num_cached_tokens >= prompt.media[-1].end
    assert driver.engine.report().images["encoded"] == len(prompt.media)


def test_a_video_in_several_pieces_gives_the_librarys_tokens(model, expected):
    """Each piece is what the tower takes in one step."""
    small = VisionModel(model.path, max_pixels=1 << 14)
    prompts = [small.prompt(*turns) for turns in CONVERSATIONS]
    whole = [len(model.prompt(*turns).media) for turns in CONVERSATIONS]
    assert [len(prompt.media) > num_whole for prompt, num_whole in zip(prompts, whole, strict=True)] == [1, 1, 0, 1]
    driver = small.driver(max_prefill_chunk=16)
    assert driver.generate(prompts, max_tokens=NUM_TOKENS) == expected


@pytest.mark.parametrize("model", ["qwen3_vl", full("qwen3_5")], indirect=True, scope="module")
@pytest.mark.parametrize("prefix_cache", [True, full(False)])
def test_a_preempted_row_with_a_video_goes_on_as_if_nothing_had_been(model, prefix_cache):
    small = VisionModel(model.path, max_pixels=1 << 14)  # several pieces each
    asked = [[f"{number} ", Shot(number), " Describe it in detail."] for number in range(4)]
    expected = [small.reply(turn, max_tokens=60) for turn in asked]
    prompts = [small.prompt(turn) for turn in asked]
    driver = small.driver(rows_bytes=small.tight_bytes(prompts, 60), prefix_cache=prefix_cache)
    assert driver.generate(prompts, max_tokens=60) == expected
    assert driver.engine.report().lanes[0].num_preemptions > 0
