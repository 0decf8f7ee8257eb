"""The command behind scripts/replay. It reports the cached tokens, and keeps a bound of what sessions share."""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

import httpx
from rich.console import Console

from vllm_mlx.cli.remote import Remote
from vllm_mlx.cli.terminal import CommandFailed
from vllm_mlx.core.errors import VLLMMLXError

from .beginnings import MOST_COMPUTED
from .conversation import Conversations
from .ideal import Ideal, Ideals, groups, print_table, to_json
from .player import Outcome, Player
from .trace import ReplayError, load


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/replay",
        description="Plays a recorded session of an agent against a running server, as that client would, and says how "
        "much of each prompt came from the server's prefix cache.",
    )
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE", help="recorded requests, one JSON object a line")
    add("--url", required=True, help="of the server, such as http://127.0.0.1:8000")
    add("--model", help="the name to ask for (default: the first that the server lists)")
    add("--session", action="append", default=[], metavar="S", help="play this session only; repeat it for more")
    add("--echo", action="store_true", help="put the server's own replies in the place of the recorded ones, altered "
        "as that client alters what it sends back")  # fmt: skip
    add("--max-tokens", type=int, metavar="N", help="lower each reply's limit to N tokens")
    add("--checkpoint", type=Path, metavar="DIR", help="the served checkpoint, to compute the ideal with its tokenizer")
    add("--chat-template", type=Path, metavar="FILE", help="the --chat-template of the server, if it has one")
    add("--most-computed", type=float, metavar="R", help="end with 1 if the requests whose beginning another session "
        "sent first computed more than R tokens for each token of the ideal (default: the bound of a known agent, by "
        "the name of the trace); needs --checkpoint")  # fmt: skip
    add("--brief", action="store_true", help="print sums only")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    arguments = parser.parse_args()
    if arguments.checkpoint is not None and not (arguments.checkpoint / "config.json").is_file():
        parser.error(f"{arguments.checkpoint} is no folder of a checkpoint: it holds no config.json")
    return arguments


def run(arguments: argparse.Namespace) -> None:
    notes = Console(stderr=True)
    trace = load(arguments.trace, arguments.session)
    url, api_key = arguments.url.rstrip("/").removesuffix("/v1"), os.environ.get("VLLM_MLX_API_KEY", "none")
    model = arguments.model or Remote(url, api_key).model().name
    conversations = Conversations(trace, model=model, max_tokens=arguments.max_tokens, echo=arguments.echo)
    player = Player(url, conversations, api_key=api_key)
    outcomes: list[Outcome] = []
    with notes.status("playing") as status:

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            status.update(f"{len(outcomes)} of {len(trace)} requests")

        asyncio.run(player.play(trace, done))
        status.update("rendering the prompts to tell the ideal")
        ideals: dict[int, Ideal] = {}
        if arguments.checkpoint is not None:
            template = arguments.chat_template.read_text() if arguments.chat_template is not None else None
            ideals = Ideals(arguments.checkpoint, chat_template=template).of(outcomes)
    outcomes.sort(key=lambda each: each.recorded.number)
    print_table(outcomes, ideals, brief=arguments.brief)
    if arguments.json is not None:
        facts = {"trace": arguments.trace.name, "echo": arguments.echo, "max_tokens": arguments.max_tokens}
        arguments.json.write_text(json.dumps(to_json(outcomes, ideals, **facts), indent=1) + "\n", encoding="utf-8")
    most = arguments.most_computed or MOST_COMPUTED.get(arguments.trace.stem)
    across = groups(outcomes, ideals).get("across sessions")
    if most and across and (computed := across.computed_of_ideal) and computed > most:
        raise ReplayError(f"Across sessions, {computed:.3f} tokens were computed for each of the ideal, over {most}.")


def main() -> None:
    try:
        run(parse_arguments())
    except (ReplayError, CommandFailed, VLLMMLXError, OSError, httpx.HTTPError) as error:
        sys.exit(f"scripts/replay: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
