"""Reads an encoder's declarations from the files of sentence-transformers, or from the settings. It guesses none."""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ..core.config import ModelConfig
from ..core.encoding import DenseLayer, EncoderFacts
from ..core.errors import ModelLoadError, first_line, setting
from ..formats.tokenizer import read_json
from .checkpoint import Checkpoint

CLASSIFIERS = ("bert", "modernbert", "xlm-roberta")
EMBEDDERS = (*CLASSIFIERS, "qwen3", "gemma3_text", "lfm2", "ministral3", "llama_bidirec")
ACTIVATIONS = ("Identity", "Tanh", "GELU", "ReLU")  # of dense layers, as torch names them
_ONLY_ENCODERS = {
    *CLASSIFIERS, "llama_bidirec", "albert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie",
    "eurobert", "gte", "jina_embeddings_v3", "mpnet", "mt5", "new", "nomic_bert", "roberta", "t5", "xlm-roberta-xl",
}  # fmt: skip
_SIGNS = ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json")
_ORDER = re.compile("|Pooling|Transformer( Pooling( Dense)*( Normalize)?)?")
_MODES = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "lasttoken",
          "mean_sqrt_len_tokens": "mean_sqrt_len", "weightedmean_tokens": "weightedmean"}  # fmt: skip
_SERVED_MODES = ("cls", "mean", "max", "lasttoken")
# Values in config.json that mlx-vlm's modules do not read, and those that they compute. Null stands for a default.
_BERT: Mapping[str, Any] = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
_DECODER: Mapping[str, Any] = {"hidden_act": "silu", "use_sliding_window": False}
_COMPUTED: Mapping[str, Mapping[str, Any]] = {
    "bert": _BERT,
    "xlm-roberta": _BERT,
    "modernbert": {"hidden_activation": "gelu", "rope_scaling": None},
    "qwen3": {**_DECODER, "attention_bias": False},
    "gemma3_text": {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
    "lfm2": {"rope_scaling": None},
    "ministral3": {**_DECODER, "attention_bias": False, "sliding_window": None},
    "llama_bidirec": {**_DECODER, "sliding_window": None},
}
_MAX_TOKENS = 1 << 24  # a larger number in tokenizer_config.json stands for no limit


def read_encoder(checkpoint: Checkpoint, config: ModelConfig) -> EncoderFacts | None:
    """Return what the settings and the files declare. None for a chat model. Raises ModelLoadError."""
    return None if config.task == "chat" else _Reader(checkpoint, config).facts()


def library_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the values of newer files also under the names that mlx-vlm reads."""
    rope = config.get("rope_parameters") or {}
    full, sliding = rope.get("full_attention") or rope, rope.get("sliding_attention") or {}
    base = full.get("rope_theta", config.get("rope_theta"))
    renamed = {
        "rope_theta": base,
        "rope_global_base_freq": base,
        "global_rope_theta": full.get("rope_theta"),
        "rope_local_base_freq": sliding.get("rope_theta"),
        "local_rope_theta": sliding.get("rope_theta"),
        "rope_scaling": full if full.get("rope_type", "default") != "default" else None,
        "sliding_window_pattern": config.get("_sliding_window_pattern"),
    }
    return {**config, **{name: value for name, value in renamed.items() if value is not None}}


class _Reader:
    def __init__(self, checkpoint: Checkpoint, settings: ModelConfig):
        self._checkpoint, self._path, self._settings = checkpoint, checkpoint.path, settings
        self._config, self._family = library_config(checkpoint.config), checkpoint.architecture
        self._classes = [str(name) for name in self._config.get("architectures") or ()]
        self._named = read_json(self._path / "config_sentence_transformers.json")
        transformer = next(iter(sorted(self._path.glob("sentence_*_config.json"))), self._path / "none.json")
        self._transformer = read_json(transformer)
        self._modules = self._read_modules()  # class without its package, and folder
        self._kinds = [kind for kind, _ in self._modules]

    def facts(self) -> EncoderFacts | None:
        if (task := self._task()) == "chat":
            return None
        is_causal = task == "rerank" and not self._is_classifier
        if is_causal and self._family in _ONLY_ENCODERS:
            self._refuse("has no classification head and cannot score documents")
        if not is_causal:
            self._check_family(EMBEDDERS if task == "embedding" else CLASSIFIERS)
        number = self._config.get("num_labels", len(self._config.get("id2label") or ()))
        if task == "rerank" and not is_causal and number != 1:
            self._refuse(f"is a classifier with {number} labels, and a reranker has one")
        more = self._embedding() if task == "embedding" else {}
        head = read_json(self._path / dict(self._modules).get("LogitScore", "none") / "config.json")
        answers: tuple[Any, ...] = (head.get("true_token_id"), head.get("false_token_id")) if head else ()
        if None in answers:
            self._refuse("scores by one logit, and rerankers with two are served")
        prompts = self._settings.prompts or self._named.get("prompts") or {}
        default = self._named.get("default_prompt_name")
        if default is not None and default not in prompts and not self._settings.prompts:
            self._refuse(f"names {default!r} as its default prompt, and no such prompt")
        return EncoderFacts(
            task=task,
            is_causal=is_causal,
            answer_ids=answers,
            max_tokens=self._max_tokens(),
            prompts={name: str(text or "") for name, text in prompts.items()},
            default_prompt=default if default in prompts else None,
            lowercase=bool(self._transformer.get("do_lower_case")),
            has_types=self._family == "bert" and self._config.get("type_vocab_size", 2) > 1,
            **more,
        )

    @property
    def _is_classifier(self) -> bool:
        return any(name.endswith("ForSequenceClassification") for name in self._classes)

    def _task(self) -> Any:
        if self._settings.task is not None:
            return self._settings.task
        if self._is_classifier or "LogitScore" in self._kinds or self._named.get("model_type") == "CrossEncoder":
            return "rerank"
        has_no_head = self._classes and all(name.endswith("Model") for name in self._classes)
        is_encoder = self._family in _ONLY_ENCODERS or (has_no_head and self._family in EMBEDDERS)
        return "embedding" if is_encoder or any((self._path / name).is_file() for name in _SIGNS) else "chat"

    def _read_modules(self) -> list[tuple[str, str]]:
        file = self._path / "modules.json"
        if not file.is_file():
            return [("Pooling", "1_Pooling")] if (self._path / "1_Pooling/config.json").is_file() else []
        try:
            entries = [(str(entry["type"]), str(entry["path"])) for entry in json.loads(file.read_bytes())]
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ModelLoadError(f"{file} is damaged ({first_line(error)}). Download this file again.") from error
        if other := [kind for kind, _ in entries if not kind.startswith("sentence_transformers.")]:
            self._refuse(f"needs Python code that this server does not have, {other[0]}")
        return [(kind.rpartition(".")[2], folder) for kind, folder in entries]

    def _check_family(self, served: tuple[str, ...]) -> None:
        config, family = self._config, self._family
        if family not in served:
            names = "embedding models" if served is EMBEDDERS else "rerankers"
            self._refuse(f"is of the family {family}; {names} are served of the families {', '.join(served)}")
        for name, computed in _COMPUTED[family].items():
            if config.get(name) not in (None, computed):
                self._refuse(f"has {name} {config[name]!r}, which mlx-vlm's {family} does not compute")
        sees_all = config.get("is_causal") is False or config.get("use_bidirectional_attention")
        sees_all = bool(sees_all or any("Bidirec" in name for name in self._classes))
        if family in ("qwen3", "gemma3_text", "lfm2", "ministral3") and sees_all == (family == "qwen3"):
            side = "also to later tokens" if sees_all else "to earlier tokens only"
            self._refuse(f"attends {side}, which mlx-vlm's embedders of the family {family} do not")
        is_gemma = family == "gemma3_text"
        every = config.get("sliding_window_pattern", 6) if is_gemma else config.get("global_attn_every_n_layers", 3)
        for place, kind in enumerate(config.get("layer_types") or () if is_gemma or family == "modernbert" else ()):
            if (kind == "full_attention") != ((place + is_gemma) % every == 0):
                self._refuse(f"has {kind} in layer {place}, where mlx-vlm has another kind")
        if not _ORDER.fullmatch(" ".join(self._kinds)):
            self._refuse(f"lists modules that are not served, or not in this order: {', '.join(self._kinds)}")
        if folder := dict(self._modules).get("Transformer"):
            self._refuse(f"has its model in the folder {folder}: move its files up")
        for name in ("query_expansion", "processing_kwargs"):
            if self._transformer.get(name):
                self._refuse(f"asks for {name}, which is not served")

    def _embedding(self) -> dict[str, Any]:
        normalize = self._settings.normalize
        if normalize is None and "Transformer" not in self._kinds:
            self._lacks("whether its vectors are scaled to length 1", "normalize", "true")
        dense, width = self._dense()
        declared = self._config.get("matryoshka_dimensions") or range(
            1, width * bool(self._config.get("is_matryoshka"))
        )
        return {
            "pooling": self._settings.pooling or self._pooling(),
            "normalize": "Normalize" in self._kinds if normalize is None else normalize,
            "dense": dense,
            "num_dimensions": width,
            "dimensions": tuple(size for size in declared if 0 < size < width),
        }

    def _pooling(self) -> str:
        folder = dict(self._modules).get("Pooling")
        config = {} if folder is None else read_json(self._path / folder / "config.json")
        modes = config.get("pooling_mode") or [
            name for key, name in _MODES.items() if config.get(f"pooling_mode_{key}")
        ]
        modes = [modes] if isinstance(modes, str) else modes
        if not modes:
            self._lacks("by which rule it makes one vector of a text", "pooling", "cls")
        if len(modes) > 1 or modes[0] not in _SERVED_MODES or config.get("include_prompt") is False:
            name = " and ".join(modes) + (" without the prompt" if config.get("include_prompt") is False else "")
            self._refuse(f"pools by {name}; the rules that are served are {', '.join(_SERVED_MODES)}")
        return str(modes[0])

    def _dense(self) -> tuple[tuple[DenseLayer, ...], int]:
        """Return the layers behind the pooling, and the length of a vector."""
        width, found, shapes = int(self._config["hidden_size"]), [], []
        for kind, folder in self._modules:
            layer = read_json(self._path / folder / "config.json") if kind in ("Dense", "Normalize") else {}
            if layer.get("module_input_name") not in (None, "sentence_embedding"):
                self._refuse("makes one vector of each token, and one of each text is served")
            if kind == "Dense":
                activation = str(layer.get("activation_function")).rpartition(".")[2]
                if activation not in ACTIVATIONS or layer.get("use_residual"):
                    self._refuse(f"has a dense layer that is not served: {activation} in {folder}")
                width = int(layer["out_features"])
                found.append(DenseLayer(folder, activation))
                shapes.append((activation, bool(layer.get("bias", True)), width))
        if self._family != "gemma3_text":
            return tuple(found), width
        first = int(self._config["hidden_size"])  # the module itself has these layers, and no other ones
        if self._kinds and shapes != [("Identity", False, 4 * first), ("Identity", False, first)]:
            self._refuse("has other dense layers than EmbeddingGemma, whose two are all that mlx-vlm computes")
        return (), first

    def _max_tokens(self) -> int:
        table = self._checkpoint.max_model_len
        if table is not None and self._family == "xlm-roberta":
            table -= self._config.get("pad_token_id", 1) + 1  # its positions begin behind that of the padding
        declared = [self._settings.max_model_len]
        if self._settings.max_model_len is None:
            named = read_json(self._path / "tokenizer_config.json").get("model_max_length")
            declared = [self._transformer.get("max_seq_length"), named]
        limits = [value for value in (table, *declared) if isinstance(value, int) and 0 < value < _MAX_TOKENS]
        if not limits:
            self._lacks("the length of its longest input, in tokens", "max_model_len", "512")
        return min(limits)

    def _lacks(self, fact: str, name: str, value: str) -> NoReturn:
        written = value if value in ("true", "512") else f'"{value}"'
        flag = setting(name) if value == "true" else f"{setting(name)} {value}"
        self._refuse(
            f"does not say {fact}", f"Add what its authors say: `{flag}`, or `{name} = {written}` in its table"
        )

    def _refuse(self, reason: str, advice: str = "Use another checkpoint") -> NoReturn:
        raise ModelLoadError(f"{self._path} {reason}. {advice}.")
