"""Makes the bundled demo checkpoint from nothing, or scores one: `python -m scripts.train_demo`. README.md says how."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

SCORE_SEED = 2_026
SCORES = "scores.json"
CARD = "README.md"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="train, score, and put the checkpoint here")
    task.add_argument("--score", metavar="DIR|URL", help="only score a checkpoint, or what a server at URL serves")
    task.add_argument("--offer", type=Path, nargs=2, metavar=("DIR", "OUT"), help="score DIR; put it in OUT if better")
    task.add_argument(
        "--freeze",
        type=Path,
        nargs=2,
        metavar=("DIR", "FILE"),
        help="answer the prompts in FILE with the checkpoint in DIR",
    )
    parser.add_argument("--steps", type=int, help="steps of the joint stage, if not those of the bundled checkpoint")
    parser.add_argument("--per-skill", type=int, default=50, help="questions a skill when scoring")
    parser.add_argument("--far", type=int, default=20, help="questions of each long test")
    parser.add_argument("--forced", action="store_true", help="score a checkpoint by teacher forcing, in torch")
    parser.add_argument("--text-only", action="store_true", help="ask nothing about pictures")
    parser.add_argument("--seed", type=int, default=SCORE_SEED, help="seed of the questions")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint that scores better")
    parser.add_argument(
        "--taken", nargs=2, metavar=("COURSES", "DIR"), help="train on from DIR, a checkpoint after so many courses"
    )
    parser.add_argument("--resume-vision", type=Path, metavar="FILE", help="keep the vision stage's weights in FILE")
    return parser.parse_args()


def scored(what: str, options: argparse.Namespace) -> dict:
    """Prints the table; gives what scores.json holds."""
    from . import scoring

    questions = [
        *scoring.items(options.seed, options.per_skill, text_only=options.text_only),
        *scoring.far_items(options.seed + 1, options.far),
    ]
    judge = forced(what) if options.forced else asked(what)
    result = scoring.score(judge(questions), log=lambda line: print(line, flush=True))
    print(result.table())
    shares = {skill: [result.right[skill], asked] for skill, asked in result.asked.items()}
    return {"overall": round(result.overall(), 4), "seed": options.seed, "skills": shares}


def asked(what: str) -> Callable:
    """Items to verdicts, by what a checkpoint or a server replies."""
    from . import asking, scoring

    asker = asking.Served(what) if what.startswith("http") else asking.Greedy(Path(what))
    return partial(scoring.verdicts, asker)


def forced(what: str) -> Callable:
    """The same by teacher forcing."""
    from .forced import Forced

    return Forced(Path(what)).verdicts


def known_overall(folder: Path) -> float:
    """What the checkpoint in `folder` scored when it was made; 0 if there is none."""
    path = folder / SCORES
    return json.loads(path.read_text())["overall"] if path.exists() else 0.0


def offer(fresh: Path, folder: Path, scores: dict, *, force: bool) -> bool:
    """Puts the checkpoint in `fresh` into `folder` with its scores, unless a better one lies there: then both stay.

    What else lies in the folder, such as its module, stays.
    """
    (fresh / SCORES).write_text(json.dumps(scores, indent=1) + "\n")
    before = known_overall(folder)
    if before > scores["overall"] and not force:
        print(f"{folder} scores {before:.2%}, the new one {scores['overall']:.2%}: kept. The new one is in {fresh}.")
        return False
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(fresh.iterdir()):
        shutil.copyfile(path, folder / path.name)
    print(f"installed in {folder}; refresh the table in its {CARD} and the frozen replies of the tests")
    return True


def main() -> int:
    options = arguments()
    if options.score:
        scored(options.score, options)
        return 0
    if options.freeze:
        from .frozen import freeze

        freeze(*options.freeze)
        return 0
    if options.offer:
        fresh, folder = options.offer
        return 0 if offer(fresh, folder, scored(str(fresh), options), force=options.force) else 1
    from . import recipe

    fresh = options.out.with_name(options.out.name + ".new")
    taken = (int(options.taken[0]), Path(options.taken[1])) if options.taken else None
    recipe.train(fresh, steps=options.steps, vision_cache=options.resume_vision, taken=taken)
    if not offer(fresh, options.out, scored(str(fresh), options), force=options.force):
        return 1
    shutil.rmtree(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
