"""What a server of two models counts: today's figures keep their names, and are the sums over the models."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.golden.normal import shape
from tests.golden.streams import ASKED, PATHS
from tests.support.figures import declared
from tests.support.running import eventually, serving, slowly
from vllm_mlx.cache.stats import TreeStats
from vllm_mlx.core.catalogue import Catalogue, Entry
from vllm_mlx.core.config import EngineConfig, ModelConfig
from vllm_mlx.core.figure import readings
from vllm_mlx.engine.loading import start_engine
from vllm_mlx.engine.monitoring.counters import Stalls, Totals
from vllm_mlx.engine.monitoring.schema import DraftStatus, EngineReport, LaneReport, LaneRow

GOLDEN = Path(__file__).parents[1] / "golden/files"
NAMES = ("coder", "small")
COUNTS = (
    "total_requests_processed", "total_prompt_tokens", "total_cached_tokens", "total_disk_tokens",
    "total_completion_tokens", "total_encoded_inputs", "total_encoded_tokens", "generation_tps", "prompt_tps",
)  # fmt: skip


@pytest.fixture(scope="module")
def client(checkpoint: Callable[..., Path]) -> Iterator[httpx.Client]:
    """Of a server that has answered both models in every protocol, and has refused, failed and lost some."""
    coder, small = (
        ModelConfig(model=str(checkpoint(name)), num_draft_tokens=3) for name in ("qwen3", "vision:qwen3_vl")
    )
    models = Catalogue(
        (
            Entry(config=coder, name="coder", aliases=("gpt-5",), pin=True),
            Entry(config=small, name="small", patterns=("claude-*haiku*",)),
        )
    )
    engine = start_engine(EngineConfig(model=coder.model), None, models)
    with serving(engine, models=models) as running, running.http() as client:
        for number, model in enumerate((*NAMES, "gpt-5", "claude-3-5-haiku", "coder")):
            for protocol, path in PATHS.items():
                body = {**ASKED[protocol], "model": model, "temperature": 0, "stream": bool(number % 2)}
                body["max_output_tokens" if protocol == "responses" else "max_tokens"] = 8 + number
                assert client.post(path, json=body).status_code == 200
        echo = {"model": "small", "prompt": "1 2 3 4 1 2 3 4 1 2 3 4", "max_tokens": 60, "ignore_eos": True, "n": 2}
        assert client.post("/v1/completions", json=echo).status_code == 200
        assert client.post("/v1/completions", json={"model": "small", "prompt": 5}).status_code == 400
        lost = {**echo, "max_tokens": 1500, "stream": True}
        with slowly(running), client.stream("POST", "/v1/completions", json=lost) as left:
            next(left.iter_lines())
        eventually(lambda: client.get("/v1/status").json()["status"] == "idle")
        yield client


def metrics(client: httpx.Client) -> list[Metric]:
    return list(text_string_to_metric_families(client.get("/metrics").text))


def rows(status: dict[str, Any]) -> list[dict[str, Any]]:
    return status["models"]


def test_fields_and_labels_of_one_model_are_those_of_several(client: httpx.Client) -> None:
    before = json.loads((GOLDEN / "status.json").read_text())["idle"]
    for path, fields in before.items():
        assert not fields.keys() - shape(client.get(path).json()).keys(), path
    families = {family.name: family for family in metrics(client)}
    for name, was in json.loads((GOLDEN / "metrics.json").read_text()).items():
        family = families.pop(name)
        assert family.type == was["kind"]
        labels = {tuple(sorted(sample.labels)) for sample in family.samples}
        kept = {part.partition("=")[0] for sample in was["samples"].values() for part in sample[0].split(", ")}
        assert {label for each in labels for label in each} == kept
    assert not families, "several models have no figures that one has not"


def test_names_are_those_that_are_served(client: httpx.Client) -> None:
    status = client.get("/v1/status").json()
    assert [(row["name"], row["pinned"]) for row in rows(status)] == [("coder", True), ("small", False)]
    assert status["served_model_names"] == ["coder", "gpt-5", "small"]
    labels = {sample.labels["model_name"] for family in metrics(client) for sample in family.samples}
    assert labels == set(NAMES)


def test_figures_of_the_models_add_up_to_the_process(client: httpx.Client) -> None:
    status = client.get("/v1/status").json()
    for name in COUNTS:
        assert sum(row[name] for row in rows(status)) == pytest.approx(status[name], abs=0.02), name
    for outcome, number in status["outcomes"].items():
        assert sum(row["outcomes"][outcome] for row in rows(status)) == number
    drafts = [row["drafts"] for row in rows(status)]
    for kind in ("drafted_tokens", "accepted_tokens"):
        for source, number in status["drafts"][kind].items():
            assert sum(each[kind][source] for each in drafts) == number
    assert sum(each["num_drafts"] for each in drafts) == status["drafts"]["num_drafts"] > 0
    assert sum(row["weights_bytes"] for row in rows(status)) == status["memory"]["weights_bytes"]
    coder, small = rows(status)
    assert coder["total_requests_processed"] == 12 and coder["outcomes"]["aborted"] == 0
    assert small["total_requests_processed"] == 10 and small["outcomes"]["aborted"] == 2
    assert 0 < coder["total_cached_tokens"] < coder["total_prompt_tokens"]
    assert all(row["loads"] == {"start": 1, "request": 0, "command": 0} for row in rows(status))


def test_metrics_of_each_model_are_its_figures_in_the_status(client: httpx.Client) -> None:
    status = client.get("/v1/status").json()
    found: dict[tuple[str, ...], float] = defaultdict(float)
    for family in metrics(client):
        for sample in family.samples:
            rest = {value for label, value in sample.labels.items() if label not in ("model_name", "engine")}
            found[(sample.labels["model_name"], sample.name, *sorted(rest))] += sample.value
    for row in rows(status):
        name, outcomes, drafts = row["name"], row["outcomes"], row["drafts"]
        assert found[name, "vllm:prompt_tokens_total"] == row["total_prompt_tokens"]
        assert found[name, "vllm:prefix_cache_hits_total"] == row["total_cached_tokens"]
        assert found[name, "vllm:generation_tokens_total"] == row["total_completion_tokens"]
        assert found[name, "vllm_mlx_requests_total"] == row["total_requests_processed"]
        assert found[name, "vllm:request_success_total", "length"] == outcomes["length"] > 0
        assert found[name, "vllm:request_success_total", "abort"] == outcomes["aborted"] + outcomes["cancelled"]
        ended = outcomes["stop"] + outcomes["length"] + outcomes["tool_calls"]
        assert found[name, "vllm:e2e_request_latency_seconds_count"] == ended
        assert found[name, "vllm:spec_decode_num_drafts_total"] == drafts["num_drafts"]
        for sample, number in (*declared(LaneRow, row), *declared(DraftStatus, drafts)):
            assert (name, *sample) in found and found[(name, *sample)] == number, sample


def test_a_declared_figure_is_a_metric(client: httpx.Client) -> None:
    found = {family.name for family in metrics(client)}
    for section in (Totals, LaneRow, LaneReport, EngineReport, TreeStats, Stalls):
        names = [figure.name for figure, _ in readings(section, defaultdict(int))]
        assert names and {name if name.startswith("vllm:") else f"vllm_mlx_{name}" for name in names} <= found
