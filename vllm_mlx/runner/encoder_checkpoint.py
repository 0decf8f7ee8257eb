"""Reads an encoder's declarations from the files of sentence-transformers, or from the settings. It guesses none."""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ..core.config import ModelConfig
from ..core.encoding import EncoderFacts
from ..core.errors import ModelLoadError, first_line, setting
from ..formats.tokenizer import read_json
from .checkpoint import Checkpoint

CLASSIFIERS = ("bert", "modernbert", "xlm-roberta")
EMBEDDERS = (*CLASSIFIERS, "qwen3", "gemma3_text", "lfm2", "ministral3", "llama_bidirec")
_ONLY_ENCODERS = {
    *CLASSIFIERS, "llama_bidirec", "albert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie",
    "eurobert", "gte", "jina_embeddings_v3", "mpnet", "mt5", "new", "nomic_bert", "roberta", "t5", "xlm-roberta-xl",
}  # fmt: skip
_ORDER = re.compile("|Pooling|Transformer( Pooling( Dense)*( Normalize)?)?")
_POOLING = ("cls", "mean", "max", "lasttoken")
_ACTIVATIONS = ("Identity", "Tanh", "GELU", "ReLU")  # of dense layers
_MAX_TOKENS = 1 << 24  # a larger number in tokenizer_config.json means no limit


def read_encoder(checkpoint: Checkpoint, config: ModelConfig) -> EncoderFacts | None:
    """Return the declarations of settings and files. None for a chat model. Raises ModelLoadError."""
    try:
        return _Reader(checkpoint, config).facts()
    except (OSError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise ModelLoadError(f"A JSON file in {checkpoint.path} is damaged ({first_line(error)}).") from error


def library_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the values of newer files also under the names that mlx-vlm reads."""
    rope = config.get("rope_parameters") or {}
    full, near = rope.get("full_attention", rope), rope.get("sliding_attention", {}).get("rope_theta")
    base = full.get("rope_theta", config.get("rope_theta"))
    named = {
        "rope_theta": base, "rope_global_base_freq": base, "global_rope_theta": full.get("rope_theta"),
        "rope_local_base_freq": near, "local_rope_theta": near,
        "rope_scaling": full if full.get("rope_type", "default") != "default" else None,
        "sliding_window_pattern": config.get("_sliding_window_pattern"),
    }  # fmt: skip
    return {**config, **{name: value for name, value in named.items() if value is not None}}


class _Reader:
    def __init__(self, checkpoint: Checkpoint, settings: ModelConfig):
        self._checkpoint, self._path, self._settings = checkpoint, checkpoint.path, settings
        self._config, self._family = library_config(checkpoint.config), checkpoint.architecture
        self._classes = " ".join(self._config.get("architectures") or ()) + " "
        self._named = read_json(self._path / "config_sentence_transformers.json")
        self._transformer = read_json(next(self._path.glob("sentence_*_config.json"), self._path / "none.json"))
        file, signs = self._path / "modules.json", ("1_Pooling/config.json", "config_sentence_transformers.json")
        has_pooling, has_named = ((self._path / name).is_file() for name in signs)
        listed = [(each["type"], each["path"]) for each in json.loads(file.read_bytes())] if file.is_file() else []
        if outside := [folder for _, folder in listed if folder == ".." or "/" in folder]:
            self._refuse(f"has a module in {outside[0]}, and modules lie in folders of the checkpoint")
        self._modules = [(re.sub(r"^sentence_transformers\..*\.", "", kind), folder) for kind, folder in listed]
        self._has_files = bool(listed) or has_pooling or has_named
        if has_pooling and not listed:
            self._modules = [("Pooling", "1_Pooling")]
        self._kinds = [kind for kind, _ in self._modules]

    def facts(self) -> EncoderFacts | None:
        settings, is_classifier = self._settings, "ForSequenceClassification " in self._classes
        task: Any = settings.task or self._task(is_classifier)
        if task != "embedding" and (settings.pooling or settings.normalize is not None):
            self._refuse(f"has the task {task}, to which no pooling belongs", f"Set {setting('task')} embedding")
        if task == "chat":
            return None
        if not (is_causal := task == "rerank" and not is_classifier):
            self._check_family(EMBEDDERS if task == "embedding" else CLASSIFIERS)
        head = read_json(self._path / dict(self._modules).get("LogitScore", "none") / "config.json")
        answers: tuple[Any, ...] = (head.get("true_token_id"), head.get("false_token_id")) if head else ()
        if None in answers:
            self._refuse("scores by one logit, and rerankers with two are served")
        prompts, default = settings.prompts or self._named.get("prompts") or {}, self._named.get("default_prompt_name")
        if default not in (None, *prompts) and not settings.prompts:
            self._refuse(f"has no prompt {default!r}, which is its default prompt")
        return EncoderFacts(
            task=task, is_causal=is_causal, answer_ids=answers, max_tokens=self._max_tokens(),
            prompts={name: text or "" for name, text in prompts.items()},
            default_prompt=default if default in prompts else None,
            lowercase=bool(self._transformer.get("do_lower_case")),
            has_types=self._family == "bert" and self._config.get("type_vocab_size", 2) > 1,
            **(self._embedding() if task == "embedding" else {}),
        )  # fmt: skip

    def _task(self, is_classifier: bool) -> str:
        if is_classifier or "LogitScore" in self._kinds or self._named.get("model_type") == "CrossEncoder":
            return "rerank"
        is_bare = self._family in EMBEDDERS and re.fullmatch(r"(\w+Model )+", self._classes)
        return "embedding" if is_bare or self._has_files or self._family in _ONLY_ENCODERS else "chat"

    def _check_family(self, served: tuple[str, ...]) -> None:
        config, family = self._config, self._family
        if family not in served:
            names = "embedding models" if served is EMBEDDERS else "classifiers"
            self._refuse(f"is of the family {family}; {names} are served of the families {', '.join(served)}")
        act = "gelu" if family in CLASSIFIERS else "gelu_pytorch_tanh" if family == "gemma3_text" else "silu"
        computed = {  # by mlx-vlm's modules, which do not read these values
            "hidden_act": act, "hidden_activation": act, "position_embedding_type": "absolute", "is_decoder": False,
            "attention_bias": False, "use_sliding_window": False,
            **({"rope_scaling": None} if family in ("modernbert", "lfm2") else {}),
            **({"sliding_window": None} if family in ("ministral3", "llama_bidirec") else {}),
        }  # fmt: skip
        for name, value in computed.items():
            if config.get(name) not in (None, value):
                self._refuse(f"has {name} {config[name]!r}, which mlx-vlm's {family} does not compute")
        sees_all = config.get("is_causal") is False or config.get("use_bidirectional_attention") is True
        if family in ("qwen3", *EMBEDDERS[4:7]) and (sees_all or "Bidirec" in self._classes) == (family == "qwen3"):
            side = "also to later tokens" if family == "qwen3" else "to earlier tokens only"
            self._refuse(f"attends {side}, which mlx-vlm's embedders of the family {family} do not")
        if not _ORDER.fullmatch(" ".join(self._kinds)):
            self._refuse(f"has modules that are not served, or not in this order: {', '.join(self._kinds)}")

    def _embedding(self) -> dict[str, Any]:
        normalize, pooling, width = self._settings.normalize, self._settings.pooling, int(self._config["hidden_size"])
        dense, is_gemma = {}, self._family == "gemma3_text"
        for kind, folder in self._modules:
            config = read_json(self._path / folder / "config.json")
            if kind == "Pooling" and pooling is None:
                pooling = self._pooling(config)
            elif kind == "Dense":
                width, dense[folder] = int(config["out_features"]), config["activation_function"].rpartition(".")[2]
                if dense[folder] not in _ACTIVATIONS[: 1 if is_gemma else None] or config.get("use_residual"):
                    self._refuse(f"has a dense layer that is not served ({dense[folder]} in {folder})")
        if pooling is None:
            self._refuse(
                "does not say how it pools",
                f'Set {setting("pooling")} or write `pooling = "cls"`, by its authors\' rule',
            )
        if normalize is None and "Transformer" not in self._kinds:
            self._refuse(
                "does not say if vectors have length 1", f"Set {setting('normalize')} or write `normalize = true`"
            )
        sizes = self._config.get("matryoshka_dimensions") or range(1, width if self._config.get("is_matryoshka") else 1)
        return {
            "pooling": pooling, "normalize": "Normalize" in self._kinds if normalize is None else normalize,
            "dense": {} if is_gemma else dense,  # mlx-vlm's module of Gemma has the layers
            "num_dimensions": width, "dimensions": tuple(size for size in sizes if 0 < size < width),
        }  # fmt: skip

    def _pooling(self, config: Mapping[str, Any]) -> Any:
        modes = config.get("pooling_mode") or [
            re.sub("pooling_mode_|_tokens?$", "", key)
            for key in config
            if key.startswith("pooling_mode_") and config[key]
        ]
        name = modes if isinstance(modes, str) else " and ".join(modes)
        name += "" if config.get("include_prompt", True) else " without the prompt"
        if name not in ("", *_POOLING):
            self._refuse(f"pools by {name}; the rules that are served are {', '.join(_POOLING)}")
        return name or None

    def _max_tokens(self) -> int:
        table, given = self._checkpoint.max_model_len, self._settings.max_model_len
        if table is not None and self._family == "xlm-roberta":
            table -= self._config.get("pad_token_id", 1) + 1  # its positions begin behind that of the padding
        named = read_json(self._path / "tokenizer_config.json").get("model_max_length")
        declared = (self._transformer.get("max_seq_length"), named) if given is None else (given,)
        limits = [value for value in (table, *declared) if isinstance(value, int) and 0 < value < _MAX_TOKENS]
        if not limits:
            self._refuse("does not say how long an input may be", f"Set {setting('max_model_len')}")
        return min(limits)

    def _refuse(self, reason: str, advice: str = "Use another checkpoint") -> NoReturn:
        raise ModelLoadError(f"{self._path} {reason}. {advice}.")
