"""Makes the demo checkpoint from nothing, or scores one: `python -m scripts.train_demo`. README.md says how."""

import argparse
import json
from functools import partial
from pathlib import Path

SCORE_SEED = 2_026
SCORES = "scores.json"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, metavar="DIR", help="train a checkpoint into DIR and score it")
    task.add_argument("--score", type=Path, metavar="DIR", help="only score the checkpoint in DIR")
    task.add_argument("--freeze", type=Path, nargs=2, metavar=("DIR", "FILE"), help="answer the prompts in FILE with "
        "the checkpoint in DIR")  # fmt: skip
    parser.add_argument("--steps", type=int, help="steps of the joint stage, if not those of the bundled checkpoint")
    parser.add_argument("--per-skill", type=int, default=50, help="questions a skill when scoring")
    parser.add_argument("--far", type=int, default=20, help="questions of each long test")
    parser.add_argument("--forced", action="store_true", help="score by teacher forcing, in torch")
    parser.add_argument("--seed", type=int, default=SCORE_SEED, help="seed of the questions")
    parser.add_argument(
        "--taken", nargs=2, metavar=("COURSES", "DIR"), help="train on from DIR, a checkpoint after so many courses"
    )
    return parser.parse_args()


def scored(folder: Path, options: argparse.Namespace) -> dict:
    """Print the table, and return the content of scores.json."""
    from . import scoring

    questions = [
        *scoring.items(options.seed, options.per_skill),
        *scoring.far_items(options.seed + 1, options.far),
    ]
    if options.forced:
        from .torch_scoring import Forced

        verdicts = Forced(folder).verdicts(questions)
    else:
        verdicts = map(partial(scoring.judged, scoring.Greedy(folder)), questions)
    result = scoring.score(verdicts, log=lambda line: print(line, flush=True))
    print(result.table())
    shares = {skill: [result.right[skill], asked] for skill, asked in result.asked.items()}
    return {"overall": round(result.overall(), 4), "seed": options.seed, "skills": shares}


def main() -> None:
    options = arguments()
    if options.score:
        scored(options.score, options)
    elif options.freeze:
        from .torch_scoring import freeze

        freeze(*options.freeze)
    else:
        from . import recipe

        taken = (int(options.taken[0]), Path(options.taken[1])) if options.taken else None
        recipe.train(options.out, steps=options.steps, taken=taken)
        (options.out / SCORES).write_text(json.dumps(scored(options.out, options), indent=1) + "\n")


if __name__ == "__main__":
    main()
