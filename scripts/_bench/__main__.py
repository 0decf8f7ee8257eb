"""The command behind scripts/bench. It reports speeds, and does not fail because they are low."""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console

from scripts.served import BenchmarkError

from . import disk, embeddings, guiding, serving, tables, thoughts, vision
from .checkpoint import ARCHITECTURES, write_tiny
from .figures import MLX_LM, Figure, Rival, measure, print_table, to_json

Workloads = Callable[[Path], AbstractContextManager[list[Figure]]]
COMPARISONS: dict[str, Callable[[Path, Rival], AbstractContextManager[list[Figure]]]] = {
    "serving": serving.serving, "cache": serving.caching,
}  # fmt: skip
WORKLOADS: dict[str, Workloads] = {
    "vision": vision.prepared, "guided": guiding.prepared, "disk": disk.prepared, "reasoning": thoughts.prepared,
    "embeddings": embeddings.prepared,
}  # fmt: skip
WRITERS: dict[str, Callable[[Path, str], Path]] = {
    "vision": lambda folder, _: vision.write_tiny(folder),
    "disk": disk.write_wide,
    "embeddings": embeddings.write_tiny,
}
TABLES: dict[str, Callable[[Sequence[str]], None]] = {"device": tables.device, "keep": tables.keep}  # computed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measures this server beside `python -m mlx_lm.server`, run by run in turn, and prints medians and "
        "ratios. The machine should have nothing else to do.",
        epilog="`scripts/bench device` prints tables that are computed for Apple chips, `scripts/bench keep` what "
        "eviction costs.",
    )
    add = parser.add_argument
    workloads = [*COMPARISONS, *WORKLOADS]
    add("workload", nargs="?", choices=workloads, default="serving", help="the figures to measure (default: serving)")
    add("--architecture", choices=ARCHITECTURES, default=ARCHITECTURES[0], help="of the tiny random checkpoint: dense, "
        "hybrid or with sliding windows")  # fmt: skip
    add("--model", type=Path, metavar="DIR", help="a checkpoint; it is loaded three times (default: a tiny random one)")
    add("--against", type=Path, metavar="DIR", help="another checkout of this repository, whose server takes the place "
        "of mlx-lm's; " + ", ".join(COMPARISONS))  # fmt: skip
    add("--runs", type=int, default=7, metavar="N", help="counted runs (default: 7)")
    add("--only", metavar="TEXT", help="only the figures whose name contains this")
    add("--json", type=Path, metavar="FILE", help="write every measured value there")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs must be at least 1")
    if arguments.against is not None and arguments.workload not in COMPARISONS:
        parser.error(f"--against is for {', '.join(COMPARISONS)}")
    if arguments.against is not None and not (arguments.against / "vllm_mlx").is_dir():
        parser.error(f"{arguments.against} is not a checkout of this repository: it has no folder vllm_mlx")
    if arguments.model is not None and not (arguments.model / "config.json").is_file():
        parser.error(f"{arguments.model} is not the folder of a checkpoint: it has no config.json")
    return arguments


@contextlib.contextmanager
def model_folder(given: Path | None, architecture: str, workload: str) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="vllm-mlx-bench-") as folder:
        yield WRITERS.get(workload, write_tiny)(Path(folder), architecture)


def prepared(arguments: argparse.Namespace, model: Path) -> AbstractContextManager[list[Figure]]:
    if arguments.workload in WORKLOADS:
        return WORKLOADS[arguments.workload](model)
    rival = MLX_LM if arguments.against is None else Rival("other checkout", arguments.against.resolve())
    return COMPARISONS[arguments.workload](model, rival)


def run(arguments: argparse.Namespace) -> None:
    notes = Console(stderr=True)
    with (
        model_folder(arguments.model, arguments.architecture, arguments.workload) as model,
        notes.status("starting the servers") as status,
        prepared(arguments, model) as all,
    ):
        figures = [figure for figure in all if arguments.only is None or arguments.only in figure.name]
        if not figures:
            raise BenchmarkError("No figure has such a name. There are: " + "; ".join(figure.name for figure in all))
        series = measure(figures, num_runs=arguments.runs, progress=status.update)
    made = {"reasoning": "replies by rote", "vision": f"tiny {vision.FAMILY}"}
    name = made.get(arguments.workload, f"tiny {arguments.architecture}")
    name = name if arguments.model is None else arguments.model.resolve().name
    print(f"{arguments.workload}, {name}, medians of {arguments.runs} runs\n")
    print_table(series)
    if arguments.json is not None:
        facts = to_json(series, workload=arguments.workload, model=name, runs=arguments.runs)
        arguments.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unwinds, so that servers are stopped
    try:
        if table := TABLES.get(next(iter(sys.argv[1:]), "")):
            return table(sys.argv[2:])
        run(parse_arguments())
    except BenchmarkError as error:
        sys.exit(f"scripts/bench: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
