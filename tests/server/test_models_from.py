"""`serve --models-from`: every checkpoint in a folder by its name, loaded when it is asked for, and nothing outside."""

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.commands import address
from tests.support.commands import served as command
from tests.support.encoders import make_encoder
from tests.support.running import eventually, serving
from vllm_mlx.cli.options import load_settings
from vllm_mlx.engine.found_models import FoundModels
from vllm_mlx.engine.loading import start_engine

FAMILIES = (
    "llama", "qwen3", "qwen3_5", "gpt_oss", "smollm3", "gemma3_text", "cohere2", "granitemoehybrid", "jamba",
    "falcon_h1", "qwen3_next", "vision:qwen3_vl",
)  # fmt: skip
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "asks", "what", "is", "new")
TIGHT: Any = {"max_model_len": 1024, "max_prefill_chunk": 64, "max_num_seqs": 8}


def place(folder: Path, name: str, family: str = "qwen3") -> Path:
    """Put a checkpoint into a folder of models, as ORG/NAME or NAME."""
    shutil.copytree(checkpoint(family), folder / name)
    return folder / name


def damage(path: Path, how: str) -> None:
    weights = path / "model.safetensors"
    match how:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:5000])
        case "config":
            (path / "config.json").write_text("{")
        case "part":
            weights.rename(path / "model-00001-of-00002.safetensors")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty checkpoints of twelve families: three of them damaged, two with the same short name."""
    folder = tmp_path_factory.mktemp("models")
    for number in range(36):
        family = FAMILIES[number % len(FAMILIES)]
        place(folder, f"org/{family.partition(':')[2] or family}-{number // len(FAMILIES)}", family)
    for how in ("cut", "config", "part"):
        damage(place(folder, f"bad/{how}"), how)
    place(folder, "other/llama-0", "llama")
    return folder


@contextmanager
def served(folder: Path, **given: Any) -> Iterator[httpx.Client]:
    """A server of a folder, with other settings as a settings file names them."""
    settings = load_settings({"models_from": [str(folder)], **given}, with_variables=False)
    config, models = settings.engine_config(), settings.catalogue()
    engine = start_engine(config, None, models)
    found = FoundModels(engine, models, config, None)
    with serving(engine, models=models, found=found) as running, running.http() as client:
        yield client


def cards(client: httpx.Client) -> dict[str, Any]:
    return {card["id"]: card for card in client.get("/v1/models").json()["data"]}


def ask(client: httpx.Client, model: str | None, text: str = "hello there", **fields: Any) -> httpx.Response:
    said = [{"role": "user", "content": text}]
    body = {"messages": said, "max_tokens": 8, "temperature": 0, **({} if model is None else {"model": model})}
    return client.post("/v1/chat/completions", json={**body, **fields})


def said(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    return choice["message"], choice["finish_reason"], answer.json()["usage"]["prompt_tokens"]


def check_many(shelf: Path, num_models: int, num_requests: int, budget: str) -> None:
    """Random requests, by both names, to models of which two have room: every reply is as alone."""
    draw, names = random.Random(7), [f"{family.partition(':')[2] or family}-1" for family in FAMILIES[:num_models]]
    texts = [" ".join(draw.choice(WORDS) for _ in range(10 + 10 * number)) for number in range(3)]
    with served(shelf, **TIGHT) as client:
        alone = {(name, text): said(ask(client, name, text)) for name in names for text in texts}
    asked = [(draw.choice(names), draw.choice(texts), draw.choice(("", "org/"))) for _ in range(num_requests)]
    with served(shelf, memory_budget=budget, **TIGHT) as client, ThreadPoolExecutor(8) as pool:
        replies = pool.map(lambda one: said(ask(client, one[2] + one[0], one[1])), asked)
        for (name, text, _), reply in zip(asked, replies, strict=True):
            assert reply == alone[name, text]
        status = client.get("/v1/status").json()
    assert status["outcomes"]["failed"] == status["outcomes"]["aborted"] == status["num_restarts"] == 0
    assert sum(row["loads"]["request"] for row in status["models"]) >= num_models
    assert sum(row["state"] == "ready" for row in status["models"]) < num_models


def test_a_dozen_requests_for_models_of_which_two_have_room(shelf: Path) -> None:
    check_many(shelf, 3, 12, "6MB")


@pytest.mark.full
def test_three_hundred_requests_for_eight_models_of_which_two_have_room(shelf: Path) -> None:
    check_many(shelf, 8, 300, "8MB")


def test_each_checkpoint_is_listed_with_its_size_its_task_and_its_state(shelf: Path) -> None:
    with served(shelf) as client:
        listed = cards(client)
        assert len(listed) == 40 and not client.get("/v1/status").json()["models"], "nothing is loaded"
        assert listed["qwen3-0"]["aliases"] == ["org/qwen3-0"] and listed["qwen3-0"]["load_bytes"] > 1_000_000
        assert (listed["qwen3_vl-1"]["task"], listed["qwen3-0"]["task"]) == ("vision", "chat")
        assert {"org/llama-0", "other/llama-0"} < listed.keys() and "llama-0" not in listed
        for name, words in (("cut", "cut short"), ("config", "not valid JSON"), ("part", "1 of its 2 files")):
            card = listed[name]
            assert (card["task"], card["state"]) == ("not served", "failed") and words in card["cause"]
            answer = ask(client, name)
            assert answer.status_code == 503 and words in answer.text and str(shelf) not in answer.text
        answer = ask(client, "llama-0")
        assert answer.status_code == 404 and "`org/llama-0`, `other/llama-0`" in answer.text
        answer = ask(client, None)
        assert answer.status_code == 404 and "Set `model`, since" in answer.text and "`org/llama-0`" in answer.text
        replies = [said(ask(client, name)) for name in ("org/llama-0", "other/llama-0", "qwen3-0", "org/qwen3-0", None)]
        assert replies[0] == replies[1] == replies[4] and replies[2] == replies[3]
        status = client.get("/v1/status").json()
        assert [row["name"] for row in status["models"]] == ["org/llama-0", "other/llama-0", "qwen3-0"]
        assert status["model_facts"]["model"].endswith("org/llama-0")
        assert next(iter(cards(client))) == "org/llama-0", "what was asked for comes first"


def test_a_model_leaves_by_idleness_and_by_command(shelf: Path) -> None:
    with served(shelf, idle_unload_s=0.3) as client:
        reply = said(ask(client, "qwen3-0"))
        eventually(lambda: cards(client)["qwen3-0"]["state"] == "unloaded")
        assert said(ask(client, "qwen3-0")) == reply
        assert client.post("/v1/models/smollm3-0/load?wait=true").json()["state"] == "ready"
        assert client.post("/v1/models/org/smollm3-0/unload?wait=true").json()["state"] == "unloaded"


def test_what_came_and_what_went_is_seen_at_the_next_look_and_what_comes_back_serves(tmp_path: Path) -> None:
    with served(tmp_path) as client:
        assert cards(client) == {} and ask(client, "one").status_code == 404
        place(tmp_path, "one")
        assert list(cards(client)) == ["one"]
        reply = said(ask(client, "one"))
        place(tmp_path, "two", "llama")
        cards(client)
        for name in ("one", "two"):
            (tmp_path / name).rename(tmp_path / f".{name}")
        assert ask(client, "two").status_code == 503, "it has gone since the last look"
        assert "no longer on disk" in ask(client, "two").text
        assert cards(client) == {} and ask(client, "one").status_code == ask(client, "two").status_code == 404
        for name in ("one", "two"):
            (tmp_path / f".{name}").rename(tmp_path / name)
        assert cards(client).keys() == {"one", "two"}
        assert said(ask(client, "one")) == reply and said(ask(client, "two"))
        assert len(client.get("/v1/status").json()["models"]) == 2, "the model that was there is used again"
        damage(tmp_path / "two", "cut")
        assert cards(client)["two"]["state"] == "failed" and ask(client, "two").status_code == 503
        shutil.rmtree(tmp_path / "two")
        place(tmp_path, "two", "smollm3")
        cards(client)
        assert said(ask(client, "two"))


def test_named_models_keep_their_settings_and_are_found_as_themselves(tmp_path: Path) -> None:
    place(tmp_path, "org/one")
    place(tmp_path, "org/two", "llama")
    own = {"model": f"{tmp_path}/org/one", "served_model_name": ["main"], "max_model_len": 512}
    with served(tmp_path, **own) as client:
        assert list(cards(client)) == ["main", "two"]
        assert (
            said(ask(client, "one"))
            == said(ask(client, "org/one"))
            == said(ask(client, None))
            == said(ask(client, "main"))
        )
        said(ask(client, "two"))
        listed = cards(client)
        assert (listed["main"]["max_model_len"], listed["two"]["max_model_len"]) == (512, 65536)
        assert [row["name"] for row in client.get("/v1/status").json()["models"]] == ["main", "two"]


def test_a_name_of_a_named_model_stands_for_that_one_alone(tmp_path: Path) -> None:
    place(tmp_path, "org/one")
    place(tmp_path, "org/two", "llama")
    away = place(tmp_path / "far/from/here", "away", "smollm3")
    with served(tmp_path, model=str(away), served_model_name=["org/one"]) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [(card["id"], Path(card["root"]).name) for card in listed] == [
            ("org/one", "away"), ("one", "one"), ("two", "two"),
        ]  # fmt: skip
        assert client.get("/v1/models/org/one").json()["root"] == str(away)
        said(ask(client, "org/one"))
        assert len(client.get("/v1/status").json()["models"]) == 1, "no other model is made for this request"
        said(ask(client, "one"))


def test_a_model_that_changed_on_disk_is_loaded_as_it_is_now(tmp_path: Path) -> None:
    place(tmp_path, "one")
    with served(tmp_path) as client:
        first = said(ask(client, "one"))
        shutil.rmtree(tmp_path / "one")
        place(tmp_path, "one", "llama")
        assert said(ask(client, "one")) == first, "the weights in memory serve on"
        cards(client)
        assert said(ask(client, "one")) != first
        eventually(lambda: [row["state"] for row in client.get("/v1/status").json()["models"]] == ["unloaded", "ready"])
        samples = [line.rpartition(" ")[0] for line in client.get("/metrics").text.splitlines() if line[0] != "#"]
        assert len(samples) == len(set(samples))
        shutil.rmtree(tmp_path / "one")
        place(tmp_path, "one")
        client.post("/v1/models/one/unload?wait=true")
        assert said(ask(client, "one")) == first
        client.post("/v1/models/one/unload?wait=true")
        shutil.rmtree(tmp_path / "one")
        assert ask(client, "one").status_code == 404


def test_a_fault_that_a_load_met_is_forgotten_when_the_files_are_mended(tmp_path: Path) -> None:
    tokenizer = place(tmp_path, "one") / "tokenizer.json"
    whole, stat = tokenizer.read_bytes(), tokenizer.stat()
    with served(tmp_path) as client:
        for content, code in ((whole[:-1] + b" ", 503), (whole, 200)):
            tokenizer.write_bytes(content)
            os.utime(tokenizer, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            assert ask(client, "one").status_code == code


def test_entries_that_lead_nowhere_and_names_without_text_disturb_no_other_checkpoint(tmp_path: Path) -> None:
    place(tmp_path, "one")
    (place(tmp_path, "loop") / "again.json").symlink_to("again.json")
    (tmp_path / "self").symlink_to("self")
    if sys.platform == "linux":  # other systems have no such names
        shutil.copytree(tmp_path / "one", tmp_path / os.fsdecode(b"no\xfftext"))
    with served(tmp_path) as client:
        listed = cards(client)
        assert listed.keys() == {"one", "loop"} and "leads to itself" in listed["loop"]["cause"]
        assert ask(client, "loop").status_code == 503 and said(ask(client, "one"))


def test_a_folder_that_is_not_there_yet_is_named_at_the_start_and_serves_once_it_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "later"
    with served(folder) as client:
        assert f"{folder}: there is no such folder now" in caplog.text
        place(folder, "one")
        assert cards(client).keys() == {"one"} and said(ask(client, "one"))


def test_encoders_are_found_with_their_tasks(tmp_path: Path) -> None:
    make_encoder(tmp_path / "vectors", "bert")
    make_encoder(tmp_path / "scores", "bert", task="rerank", pooling=None)
    make_encoder(tmp_path / "silent", "bert", pooling=None)
    with served(tmp_path) as client:
        listed = cards(client)
        assert {name: card["task"] for name, card in listed.items()} == {
            "vectors": "embedding", "scores": "rerank", "silent": "not served",
        }  # fmt: skip
        assert "pooling" in listed["silent"]["cause"]
        answer = client.post("/v1/embeddings", json={"model": "vectors", "input": ["one", "two"]})
        assert answer.status_code == 200 and len(answer.json()["data"]) == 2
        body = {"model": "scores", "query": "one", "documents": ["two"]}
        assert client.post("/v1/rerank", json=body).status_code == 200
        answer = ask(client, "vectors")
        assert answer.status_code == 400 and "start it with one more model" in answer.text
        place(tmp_path, "words", "vision:qwen3_vl")
        assert cards(client)["words"]["task"] == "vision" and "Here `words` can" in ask(client, "vectors").text
        states = {name: (card["task"], card["state"]) for name, card in cards(client).items()}
        assert states["vectors"] == ("embedding", "ready") and states["scores"] == ("rerank", "ready")


def test_a_model_that_can_never_fit_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    place(tmp_path, "small", "llama")
    large = checkpoint("qwen3", hidden_size=256, intermediate_size=1024)
    shutil.copytree(large, tmp_path / "large")
    with served(tmp_path, memory_budget="5MB", **TIGHT) as client:
        answer = ask(client, "large")
        assert answer.status_code == 400 and "the budget is 5.0 MB" in answer.text
        assert "The largest that fits is small." in answer.text
        assert said(ask(client, "small"))
        assert "the budget is 5.0 MB" in cards(client)["large"]["cause"]


TRACE = """
import os, sys
watched = {watched!r}
def note(event, args):
    is_path = event in ("open", "os.scandir", "os.listdir") and isinstance(args[0], (str, os.PathLike))
    if is_path and watched in os.path.realpath(args[0]):
        os.write(2, f"OPENED {{args[0]}}\\n".encode())
sys.addaudithook(note)
from vllm_mlx.cli.main import main
main()
"""


@contextmanager
def traced(folder: Path, watched: Path, log: Path) -> Iterator[httpx.Client]:
    """A server of a folder, whose log has each file of another one that is opened."""
    code = [sys.executable, "-c", TRACE.format(watched=str(watched))]
    with (
        log.open("w") as stderr,
        command("--models-from", str(folder), stderr=stderr, command=code) as (_, printed),
        httpx.Client(base_url=address(printed), timeout=240, trust_env=False) as client,
    ):
        yield client


def test_a_start_reads_headers_alone_and_a_further_look_nothing(shelf: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def opened() -> list[Path]:
        paths = [Path(line.split(maxsplit=1)[1]) for line in log.read_text().splitlines() if line.startswith("OPENED")]
        return [path for path in paths if path.suffix]

    with traced(shelf, shelf, log) as client:
        read = opened()
        assert {path.name for path in read} <= {
            "config.json", "tokenizer_config.json", "generation_config.json", "model.safetensors",
            "model-00001-of-00002.safetensors", "chat_template.jinja", "processor_config.json",
            "preprocessor_config.json", "special_tokens_map.json",
        }  # fmt: skip
        assert len(read) <= 10 * 40
        assert len(cards(client)) == 40
        assert {path.parent.parent.name for path in opened()[len(read) :]} <= {"bad"}
        said(ask(client, "qwen3-0"))
        assert any(path.name == "tokenizer.json" for path in opened())


def test_no_file_outside_the_named_places_is_opened(tmp_path: Path) -> None:
    inside, outside, log = tmp_path / "inside", tmp_path / "outside", tmp_path / "log"
    place(outside, "org/secret")
    for name in ("kept", "link", "file"):
        place(inside, f"org/{name}", "llama")
    blob = inside / "blobs" / "weights"
    blob.parent.mkdir()
    (inside / "org/link/model.safetensors").rename(blob)
    (inside / "org/link/model.safetensors").symlink_to(blob)
    (inside / "org/file/config.json").unlink()
    (inside / "org/file/config.json").symlink_to(outside / "org/secret/config.json")
    (inside / "folder").symlink_to(outside / "org/secret")
    (outside / "org/snapshots/abc").mkdir(parents=True)
    (outside / "org/snapshots/abc/config.json").touch()
    (inside / "models--org--hub").symlink_to(outside / "org")
    modules = make_encoder(inside / "org/modules", "bert", normalize=False) / "modules.json"
    kinds = {"Transformer": "", "Pooling": "../../../outside/org/secret"}
    modules.write_text(json.dumps([{"type": kind, "path": path} for kind, path in kinds.items()]))
    index = place(inside, "org/index", "vision:qwen3_vl") / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../../outside/org/secret/model.safetensors"}}))
    away = f"{outside}/org/secret"
    with traced(inside, outside, log) as client:
        listed = cards(client)
        assert {name for name, card in listed.items() if card["state"] == "unloaded"} == {
            "kept", "link", "index",
        }  # fmt: skip
        assert all("a link that leads out" in listed[name]["cause"] for name in ("file", "folder"))
        assert said(ask(client, "link")), "a link inside is followed"
        assert said(ask(client, "index")), "what its index names is not read"
        for name in ("file", "folder", "inside/folder", "modules"):
            assert ask(client, name).status_code == 503
        for name in ("../outside/org/secret", away, "org/../../outside/org/secret", "~/secret", "org/secret", "."):
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
                body = {"model": name, "messages": [], "prompt": "a", "input": "a", "max_tokens": 1}
                assert client.post(path, json=body).status_code in (400, 404)
            assert ask(client, name).status_code == 404
            assert client.post(f"/v1/models/x{quote(name, safe='')}/load").status_code == 404
        said(ask(client, "kept"))
        client.post("/v1/models/kept/unload?wait=true")
        weights = inside / "org/kept/model.safetensors"
        weights.unlink()
        weights.symlink_to(outside / "org/secret/model.safetensors")
        assert ask(client, "kept").status_code == 503
    assert "OPENED" not in log.read_text()


def test_a_conversation_that_changes_its_model_is_read_once_by_each(shelf: Path) -> None:
    """As Open WebUI and Zed do it: they look at the list, and send the conversation so far to another model."""
    turns: list[dict[str, str]] = [{"role": "system", "content": " ".join(WORDS * 6)}]

    def turn(client: httpx.Client, model: str) -> tuple[int, int]:
        assert model in {
            card["id"] for card in client.get("/v1/models", headers={"authorization": "Bearer x"}).json()["data"]
        }
        turns.append({"role": "user", "content": "what is new?"})
        body = {"model": model, "messages": turns, "max_tokens": 8, "temperature": 0, "stream": False}
        answer = client.post("/v1/chat/completions", json=body).json()
        turns.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    with served(shelf) as client:
        first = [turn(client, "qwen3-0") for _ in range(2)]
        second = [turn(client, "smollm3-0") for _ in range(2)]
        again = turn(client, "qwen3-0")
    assert first[0][1] == second[0][1] == 0, "nothing of one is state of the other"
    assert first[1][1] >= first[0][0] - 1 and second[1][1] >= second[0][0] - 1
    assert again[1] >= first[1][0] - 1, "the first one still has its own"
