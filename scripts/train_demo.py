"""Makes the bundled demo checkpoint from nothing, or scores one. `python scripts/train_demo.py --out vllm_mlx/demo`"""

import argparse
import json
import shutil
import sys
from pathlib import Path

SCORE_SEED = 2_026
SCORES = "scores.json"
CARD = "README.md"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--out", type=Path, help="train, score, and put the checkpoint here")
    task.add_argument("--score", type=Path, metavar="DIR", help="only score the checkpoint in DIR")
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
    parser.add_argument("--seed", type=int, default=SCORE_SEED, help="seed of the questions")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint that scores better")
    parser.add_argument("--resume-vision", type=Path, metavar="FILE", help="keep the vision stage's weights in FILE")
    return parser.parse_args()


def scored(folder: Path, options: argparse.Namespace) -> dict:
    """Prints the table; gives what scores.json holds."""
    from demo_training.scoring import score

    result = score(folder, seed=options.seed, per_skill=options.per_skill, far=options.far)
    print(result.table())
    shares = {skill: [result.right[skill], asked] for skill, asked in result.asked.items()}
    return {"overall": round(result.overall(), 4), "seed": options.seed, "skills": shares}


def known_overall(folder: Path) -> float:
    """What the checkpoint in `folder` scored when it was made; 0 if there is none."""
    path = folder / SCORES
    return json.loads(path.read_text())["overall"] if path.exists() else 0.0


def install(fresh: Path, folder: Path) -> None:
    """Replaces the checkpoint's files; what else lies in the folder, such as its module, stays."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(fresh.iterdir()):
        shutil.copyfile(path, folder / path.name)


def main() -> int:
    options = arguments()
    if options.score:
        scored(options.score, options)
        return 0
    if options.freeze:
        from demo_training.frozen import freeze

        freeze(*options.freeze)
        return 0
    from demo_training import recipe

    fresh = options.out.with_name(options.out.name + ".new")
    recipe.train(fresh, steps=options.steps or recipe.STEPS, vision_cache=options.resume_vision)
    scores = scored(fresh, options)
    (fresh / SCORES).write_text(json.dumps(scores, indent=1) + "\n")
    before = known_overall(options.out)
    if before > scores["overall"] and not options.force:
        print(
            f"{options.out} scores {before:.1%}, the new one {scores['overall']:.1%}: kept. The new one is in {fresh}."
        )
        return 1
    install(fresh, options.out)
    shutil.rmtree(fresh)
    print(f"installed in {options.out}; refresh the table in its {CARD} and the frozen replies of the tests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
