"""Greedy replies about images equal mlx-vlm's own, however rows arrive, share batches, are cut or resumed."""

from concurrent.futures import Future
from dataclasses import replace

import pytest

from tests.support.rows import cases, row
from vllm_mlx.core.errors import InvalidImage
from vllm_mlx.core.memory import ByteRoom
from vllm_mlx.core.sequence import PromptInputs
from vllm_mlx.media.rendered import ItemInputs, MediaInputs, RenderedMedia

from .vision_harness import VisionModel, full

NUM_TOKENS = 10
CONVERSATIONS = (
    (["What is in this image? ", 1],),
    ([2, "Describe it in detail."],),
    (["one ", 1, " two ", 6, " compare the first and the second"],),  # of unlike sizes
    (["hello world"],),
    ([3, "What is this?"], ["a test"], ["and ", 5, " this?"]),
    (["The quick brown fox jumps over the lazy dog. " * 4],),
)
FAMILIES = (
    *("qwen3_5", "qwen3_vl", "gemma4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5_moe", "gemma3"),
    *("gemma4_small", "gemma4_moe", "pixtral", "mistral3", "llava"),
)


@pytest.fixture(scope="module", params=cases(FAMILIES, ["gemma4", "qwen3_5"]))
def model(request, checkpoint):
    return VisionModel(checkpoint(f"vision:{request.param}"))


# What the engine does alike with every family.
one_family = pytest.mark.parametrize("model", cases(FAMILIES, ["qwen3_5"]), indirect=True, scope="module")


@pytest.fixture(scope="module")
def expected(model):
    return [model.reply(*turns, max_tokens=NUM_TOKENS) for turns in CONVERSATIONS]


@pytest.fixture(scope="module")
def prompts(model):
    return [model.prompt(*turns) for turns in CONVERSATIONS]


@row("S0-15", "S4-34")
def test_alone_batched_and_staggered_all_give_the_librarys_tokens(model, expected, prompts):
    driver = model.driver(prefix_cache=False)
    assert [driver.generate([prompt], max_tokens=NUM_TOKENS)[0] for prompt in prompts] == expected
    assert driver.generate(prompts, max_tokens=NUM_TOKENS) == expected
    seq_ids = []
    for prompt in prompts:
        seq_ids.append(driver.add(prompt, max_tokens=NUM_TOKENS))
        driver.step()
        driver.step()
    driver.run()
    assert [driver.replies[seq_id].token_ids for seq_id in seq_ids] == expected


@one_family
@pytest.mark.parametrize("chunk", [7, full(16)])
def test_chunks_of_any_length_give_the_librarys_tokens(model, expected, prompts, chunk):
    driver = model.driver(max_prefill_chunk=chunk, prefix_cache=False)
    assert driver.generate(prompts, max_tokens=NUM_TOKENS) == expected


def run(driver, prompt, **fields):
    """The reply, and how much of the prompt was not computed."""
    seq_id = driver.add(prompt, NUM_TOKENS, **fields)
    driver.run()
    assert driver.replies[seq_id].error is None
    return driver.replies[seq_id].token_ids, driver.seqs[seq_id].num_cached_tokens


def test_a_cached_image_gives_the_librarys_tokens_and_the_tower_runs_once(model, expected, prompts):
    driver = model.driver()
    for prompt, reply in zip(prompts, expected, strict=True):
        assert run(driver, prompt)[0] == reply
    encoded = driver.engine.report().images["encoded"]
    assert encoded == len({item.digest for prompt in prompts for item in prompt.media})
    for prompt, reply in zip(prompts, expected, strict=True):
        again, num_cached = run(driver, prompt)
        assert again == reply
        windows = driver.engine.default.facts.footprint.windows  # they are held again where prompts diverge
        assert windows or num_cached == len(prompt.token_ids) - 1
    assert driver.engine.report().images["encoded"] == encoded


@row("S0-14")
@one_family
def test_a_new_question_about_a_cached_image_resumes_behind_it(model):
    driver = model.driver()
    run(driver, model.prompt(["hello ", 1, " What is in this image?"]))
    asked = ["hello ", 1, " What is in this image?"], ["a test"], ["Describe it in detail."]
    prompt = model.prompt(*asked)
    reply, num_cached = run(driver, prompt)
    assert reply == model.reply(*asked, max_tokens=NUM_TOKENS)
    assert num_cached >= prompt.media[0].end
    assert driver.engine.report().images["encoded"] == 1


@one_family
@pytest.mark.parametrize("image", [5, 6])
def test_a_next_prompt_is_computed_ahead_up_to_an_image_without_features(model, image):
    """The last reply is written differently in it. The features of picture 5 are kept, those of 6 never were made."""
    driver = model.driver()
    before = ["hello ", 3, " What is this?"], ["a test of many other words"], ["and ", 5, " this?"]
    after = before[0], ["a test"], ["and ", image, " this?"], ["good"], ["Describe it in detail."]
    run(driver, model.prompt(*before))
    [seq], encoded = driver.seqs.values(), driver.engine.report().images["encoded"]
    prompt = model.prompt(*after)
    placed = tuple(replace(item, inputs={}) for item in prompt.media)
    driver.engine.keep(seq, seq.num_tokens, replace(prompt, media=placed, snapshot_points=()))
    driver.run()
    driver.engine.yield_memory()
    driver.run()
    assert driver.engine.report().images["encoded"] == encoded
    end = len(prompt.token_ids) - 1 if image == 5 else prompt.media[1].offset
    reply, num_cached = run(driver, prompt)
    assert reply == model.reply(*after, max_tokens=NUM_TOKENS)
    assert num_cached == end


@one_family
def test_an_image_known_from_elsewhere_is_not_encoded_again(model):
    driver = model.driver()
    for turns in ([1, "this?"],), (["And in another chat, this:", 1, "what is it?"],):
        assert run(driver, model.prompt(*turns))[0] == model.reply(*turns, max_tokens=NUM_TOKENS)
    assert driver.engine.report().images["encoded"] == 1


@one_family
def test_another_salt_runs_the_tower_again_and_the_same_one_does_not(model, expected, prompts):
    """Nothing that is kept of a picture tells by its time that somebody else has shown it."""
    driver = model.driver()
    encoded = []
    for salt in ("mine", "yours", "mine", "yours"):
        assert run(driver, prompts[0], cache_salt=salt)[0] == expected[0]
        encoded.append(driver.engine.report().images["encoded"])
    assert encoded == [1, 2, 2, 2]


@one_family
def test_another_picture_of_the_same_size_straight_after_gets_its_own_reply(model):
    driver = model.driver()
    replies = []
    for number in (1, 4, 7, 1):  # of one size
        turns = (["What is in this image? ", number],)
        prompt = model.prompt(*turns)
        reply, num_cached = run(driver, prompt)
        assert reply == model.reply(*turns, max_tokens=NUM_TOKENS)
        assert (number == 1 and replies) or num_cached <= prompt.media[0].offset
        replies.append(reply)
    assert replies[0] == replies[3]


@one_family
@pytest.mark.parametrize("prefix_cache", [True, full(False)])
def test_a_preempted_row_with_an_image_goes_on_as_if_nothing_had_been(model, prefix_cache):
    asked = [[f"{number} ", number, " Describe it in detail."] for number in range(4)]
    expected = [model.reply(turn, max_tokens=40) for turn in asked]
    prompts = [model.prompt(turn) for turn in asked]
    driver = model.driver(rows_bytes=model.tight_bytes(prompts, 40), prefix_cache=prefix_cache)
    assert driver.generate(prompts, max_tokens=40) == expected
    assert driver.engine.report().lanes[0].num_preemptions > 0


@one_family
def test_an_image_that_the_tower_cannot_take_ends_its_own_request_alone(model, expected, prompts):
    good = prompts[0]
    [item] = good.media
    wrong = replace(item, digest=b"wrong", inputs={name: array[..., :1] for name, array in item.inputs.items()})
    driver = model.driver()
    bad = driver.add(replace(good, media=(wrong,)), NUM_TOKENS)
    seq_id = driver.add(good, NUM_TOKENS)
    driver.run()
    assert driver.replies[bad].error is not None and driver.replies[bad].token_ids == []
    assert driver.replies[seq_id].token_ids == expected[0]


@pytest.mark.parametrize("family", cases(FAMILIES, ["qwen3_vl"]))
def test_twenty_at_once_are_all_right(checkpoint, family):
    model = VisionModel(checkpoint(f"vision:{family}"))
    conversations = [([f"{number}: What is in this image? ", number % 10],) for number in range(20)]
    expected = [model.reply(*turns, max_tokens=4) for turns in conversations]
    driver = model.driver()
    replies = driver.generate([model.prompt(*turns) for turns in conversations], max_tokens=4)
    # A rounding error can make a mixture of experts choose another expert.
    num_wrong = sum(reply != right for reply, right in zip(replies, expected, strict=True))
    assert num_wrong <= (1 if family.endswith("_moe") else 0)
    assert driver.engine.report().images["encoded"] <= 20


def late(prompt: PromptInputs) -> tuple[PromptInputs, list["Future[RenderedMedia]"]]:
    """The prompt of one image whose encoder inputs have to be made again, and each time that they are asked for."""
    asked: list[Future[RenderedMedia]] = []

    def make() -> "Future[RenderedMedia]":
        asked.append(Future())
        return asked[-1]

    [item] = prompt.media
    return replace(prompt, media=(replace(item, inputs=ItemInputs(MediaInputs(make, ByteRoom()), 0)),)), asked


@one_family
def test_a_row_waits_for_its_tensors_while_others_go_on(model, expected, prompts):
    driver = model.driver()
    prompt, asked = late(prompts[0])
    looking, talking = driver.add(prompt, NUM_TOKENS), driver.add(prompts[3], NUM_TOKENS)
    driver.run()  # until nothing can be done any more
    assert driver.replies[talking].token_ids == expected[3]
    assert driver.replies[looking].token_ids == [] and len(asked) == 1
    asked[0].set_result(RenderedMedia.of("", 0, (1,), prompts[0].media))
    driver.engine.wake()
    driver.run()
    assert driver.replies[looking].token_ids == expected[0]


@one_family
def test_tensors_that_cannot_be_made_again_end_their_own_request_alone(model, expected, prompts):
    driver = model.driver()
    prompt, asked = late(prompts[0])
    bad = driver.add(prompt, NUM_TOKENS)
    driver.run()
    asked[0].set_exception(InvalidImage("it is gone."))
    driver.engine.wake()
    good = driver.add(prompts[0], NUM_TOKENS)
    driver.run()
    assert "it is gone" in driver.replies[bad].error.message and driver.replies[bad].token_ids == []
    assert driver.replies[good].token_ids == expected[0]


@one_family
def test_one_image_a_step_is_encoded_and_decoding_rows_go_on_between(model):
    driver = model.driver(prefix_cache=False)
    talking = driver.add(model.prompt(["hello world"]), max_tokens=40)
    driver.step()
    driver.step()
    looking = [driver.add(model.prompt([number, "this?", number + 10, "or this?"]), 4) for number in (1, 2, 3)]
    num_steps, num_said = 0, len(driver.replies[talking].token_ids)
    while driver.engine.report().images["encoded"] < 6:
        before = driver.engine.report().images["encoded"]
        driver.step()
        assert driver.engine.report().images["encoded"] - before <= 1
        num_steps += 1
    assert len(driver.replies[talking].token_ids) - num_said >= num_steps - 1, "one may be in flight"
    driver.run()
    assert looking
