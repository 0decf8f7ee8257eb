"""Vectors and scores are those of sentence-transformers, on transformers and torch."""

import itertools
import json
import shutil

import numpy as np
import pytest

from tests.support.encoders import CLASSIFIERS, make_encoder
from tests.support.running_encoder import RunningEncoder, cosine

pytestmark = pytest.mark.full
torch = pytest.importorskip("torch")
sentence_transformers = pytest.importorskip("sentence_transformers")

LONG = "The quick brown fox says hello world, and def main(): return 1 + 2 été 東京 🙂. "
TEXTS = ["hello world", "x", LONG, LONG * 5, LONG * 9, "été 東京 🙂 ñ"]
PROMPTS = {"query": "query: ", "document": "the fox says: "}
# Family → options: each rule of pooling, dense layers and prompts occur.
CASES = [
    ("bert", {"pooling": "cls"}),
    ("bert", {"pooling": "max", "normalize": False}),
    ("bert", {"pooling": "mean", "dense": ((48, "Tanh"), (32, "Identity"))}),
    ("modernbert", {"pooling": "cls"}),
    ("modernbert", {"pooling": "mean", "prompts": PROMPTS, "default_prompt": "document"}),
    ("xlm-roberta", {"pooling": "cls"}),
    ("xlm-roberta", {"pooling": "mean", "dense": ((16, "GELU"),), "normalize": False}),
    ("qwen3", {"pooling": "lasttoken", "prompts": PROMPTS}),
    ("gemma3_text", {"pooling": "mean", "prompts": PROMPTS}),
    ("lfm2", {"pooling": "cls", "prompts": PROMPTS}),
    ("ministral3", {"pooling": "mean"}),
    ("llama_bidirec", {"pooling": "mean"}),
]


def reference(path, tmp_path, monkeypatch):
    """Load the checkpoint as sentence-transformers does. For two families transformers has only the one-way model."""
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] == "llama_bidirec":
        path = shutil.copytree(path, tmp_path / "llama")
        (path / "config.json").write_text(json.dumps({**config, "model_type": "llama", "is_causal": False}))
    if config["model_type"] == "lfm2":
        see_all_tokens(monkeypatch)
    return sentence_transformers.SentenceTransformer(str(path), device="cpu")


def see_all_tokens(monkeypatch):
    """Let every layer of LFM2 see both sides, as the authors of its embedding models describe."""
    from transformers.models.lfm2 import modeling_lfm2 as library

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, **_):
        b, c, x = self.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
        kernel = self.conv.weight
        mixed = torch.nn.functional.conv1d(
            b * x, kernel, self.conv.bias, padding=kernel.shape[-1] // 2, groups=len(kernel)
        )
        return self.out_proj((c * mixed).transpose(-1, -2))

    monkeypatch.setattr(library.Lfm2ShortConv, "forward", forward)
    monkeypatch.setattr(library, "create_causal_mask", lambda **_: None)
    attention = library.eager_attention_forward
    monkeypatch.setattr(library.Lfm2Attention, "is_causal", False, raising=False)
    monkeypatch.setattr(library.ALL_ATTENTION_FUNCTIONS, "get_interface", lambda *_: attention)


@pytest.mark.parametrize(("family", "options"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_vectors_are_those_of_sentence_transformers(family, options, tmp_path, monkeypatch):
    path = make_encoder(tmp_path / family, family, **options)
    model, encoder = reference(path, tmp_path, monkeypatch), RunningEncoder(path)
    for name in [None, *options.get("prompts", ())]:
        expected = np.concatenate([model.encode([text], prompt_name=name) for text in TEXTS])
        vectors = encoder.vectors(TEXTS, prompt_name=name)
        print(family, name, "least cosine", min(map(cosine, vectors, expected)))
        assert min(map(cosine, vectors, expected)) >= 0.99999
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), np.linalg.norm(expected, axis=1), rtol=1e-4)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_scores_and_order_are_those_of_sentence_transformers(family, tmp_path):
    path = make_encoder(tmp_path / family, family, task="rerank")
    words = LONG.split()
    documents = [" ".join(words[place % 7 : place % 7 + 1 + place % 11] * (1 + place % 5)) for place in range(200)]
    model = sentence_transformers.CrossEncoder(str(path), device="cpu", activation_fn=torch.nn.Sigmoid())
    expected = [float(model.predict([("the brown fox", document)])[0]) for document in documents]
    scores = RunningEncoder(path).scores("the brown fox", documents)
    print(family, "largest difference", np.abs(scores - expected).max())
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    order, rule = np.argsort(-scores, kind="stable"), np.array(expected)
    assert all(rule[one] >= rule[other] - 1e-6 for one, other in itertools.pairwise(order))
