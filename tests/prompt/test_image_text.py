"""Each image's own text stands where the template wrote a marker, and only there."""

from vllm_mlx.prompt.image_text import Markers

MARKERS = Markers("<I>", "<V>")


def test_markers_become_the_medias_texts_in_order():
    rendered = MARKERS.fill_in("a <I> b <V>.", [("<I>", "111"), ("<V>", "2")])
    assert rendered is not None
    assert rendered.text == "a 111 b 2."
    assert [rendered.text[start:][:1] for start in rendered.image_starts] == ["1", "2"]


def test_a_marker_that_the_conversation_says_stays_text():
    messages = MARKERS.hide([{"content": "what is <I>?", "n": 1}, {"content": [{"text": "<V>"}]}])
    said = f"{messages[0]['content']} <I> {messages[1]['content'][0]['text']}"
    rendered = MARKERS.fill_in(said, [("<I>", "###")])
    assert rendered is not None
    assert rendered.text == "what is <I>? ### <V>"
    assert rendered.image_starts == (13,)
    assert messages[0]["n"] == 1


def test_a_template_that_leaves_an_image_out_is_noticed():
    assert MARKERS.fill_in("a <I> b", [("<I>", "1"), ("<I>", "2")]) is None
    assert MARKERS.fill_in("a b", [("<I>", "1")]) is None
    assert MARKERS.fill_in("a <V> b <I>", [("<I>", "1"), ("<V>", "2")]) is None
    assert Markers("<I>").fill_in("a <V>", [("<V>", "1")]) is None
