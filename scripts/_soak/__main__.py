"""Puts a server under load for as long as asked, and prints the results. Its exit code is 1 if something was wrong.

mixed: clients of every kind against a small budget. kills: kill -9 under load, again and again. connections: a
thousand that idle or drip, beside hundreds that ask. hostile: two keys, of which one fills whatever can be filled, and
how long the other waits.
"""

import argparse
import json
import os
import sys

from .connections import many_connections
from .hostile import hostile_key
from .kills import many_kills
from .mixed import mixed_load

PARTS = {"mixed": mixed_load, "kills": many_kills, "connections": many_connections, "hostile": hostile_key}


def main() -> int:
    options = _options()
    report = PARTS[options.part](options)
    print(json.dumps({**report, "machine_load": [round(each, 1) for each in os.getloadavg()]}, indent=1))
    return 1 if report["wrong"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=PARTS, default="mixed", help="the load (default: mixed)")
    parser.add_argument("--minutes", type=float, default=60, help="all but kills: how long (default: 60)")
    parser.add_argument("--times", type=int, default=50, help="kills: how often (default: 50)")
    parser.add_argument("--clients", type=int, default=8, help="mixed: at once (default: 8)")
    parser.add_argument("--active", type=int, default=200, help="connections: that ask at once (default: 200)")
    parser.add_argument("--idle", type=int, default=1000, help="connections: that idle or drip (default: 1000)")
    parser.add_argument("--memory-mb", type=int, default=26, help="mixed: budget of the server (default: 26)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of what is drawn; give each part of a long run another seed"
    )
    parser.add_argument("--model", default="demo", help="checkpoint to serve (default: demo)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
