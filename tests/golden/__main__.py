"""Compares what is made now with the files. `--write` writes the words that differ and prints them, old and new.

What must not change is written by `--write-all` only: it breaks clients, monitors or scripts.
"""

import sys

from .kept import FOLDER, GOLDENS, changed_words


def main(arguments: list[str]) -> int:
    write_all = "--write-all" in arguments
    write_words = write_all or "--write" in arguments
    num_broken = 0
    FOLDER.mkdir(exist_ok=True)
    for golden in GOLDENS:
        made, kept = golden.make(), golden.kept
        if made == kept:
            continue
        if golden.is_words:
            _print_table(golden.name, kept, made)
        else:
            print(f"{golden.name} differs, which breaks clients; the diff of --write-all shows where.")
            num_broken += not write_all
        if write_words if golden.is_words else write_all:
            golden.path.write_bytes(made.encode())
    return min(num_broken, 1)


def _print_table(name: str, kept: str, made: str) -> None:
    print(f"\n{name}\n\n| where | old | new |\n| --- | --- | --- |")
    for where, old, new in changed_words(kept, made):
        print("| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in (where, old, new)) + " |")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
