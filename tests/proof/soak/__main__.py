"""`python -m tests.proof.soak kills`, `clients`, `interrupts`, `fleet`, `hostile` and `tabs`: see README.md."""

import argparse
import sys
import time
from functools import partial


def main() -> int:
    """Run one of them; return 1 if something was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.soak", description="Long runs of real processes.")
    commands = parser.add_subparsers(dest="command", required=True)
    kills = commands.add_parser("kills", help="processes that are ended by kill -9 at random moments")
    kills.add_argument("--rounds", type=int, default=500)
    kills.add_argument("--seed", type=int, default=None, help="default: the time")
    kills.add_argument("--only", action="append", default=[], help="a kind of process; may be repeated")
    clients = commands.add_parser("clients", help="many clients of one server, which come and leave")
    clients.add_argument("--clients", type=int, default=32)
    clients.add_argument("--minutes", type=float, default=30.0)
    clients.add_argument("--seed", type=int, default=None, help="default: the time")
    interrupts = commands.add_parser("interrupts", help="commands that get Ctrl-C in their first moments")
    interrupts.add_argument("--starts", type=int, default=500)
    interrupts.add_argument("--beside", type=int, default=4, help="how many run at a time")
    interrupts.add_argument("--seed", type=int, default=None, help="default: the time")
    interrupts.add_argument("--only", action="append", default=[], help="a command; may be repeated")
    fleet = commands.add_parser("fleet", help="replicas behind Ray Serve that are stopped and killed")
    fleet.add_argument("--minutes", type=float, default=5.0)
    fleet.add_argument("--replicas", type=int, default=4)
    fleet.add_argument("--conversations", type=int, default=20)
    fleet.add_argument("--ingresses", type=int, default=1)
    fleet.add_argument("--seed", type=int, default=None, help="default: the time")
    hostile = commands.add_parser("hostile", help="a server under connections that mean harm")
    hostile.add_argument("--connections", type=int, default=64)
    hostile.add_argument("--minutes", type=float, default=10.0)
    hostile.add_argument("--seed", type=int, default=None, help="default: the time")
    hostile.add_argument("--busy", type=int, default=0, help="programs beside it that take a core each")
    tabs = commands.add_parser("tabs", help="tabs of a browser that share the chat page's conversations")
    tabs.add_argument("--tabs", type=int, default=4)
    tabs.add_argument("--steps", type=int, default=500)
    tabs.add_argument("--seed", type=int, default=None, help="default: the time")
    arguments = parser.parse_args()
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    say = partial(print, flush=True)
    say(f"seed {seed}")
    if arguments.command == "clients":
        from tests.proof.soak.clients import Clients

        return not Clients(seed, arguments.clients, say).run(60 * arguments.minutes)
    if arguments.command == "hostile":
        from tests.proof.soak.hostile import Hostile

        return not Hostile(seed, arguments.connections, say, busy=arguments.busy).run(60 * arguments.minutes)
    if arguments.command == "interrupts":
        from tests.proof.soak.interrupts import Interrupts

        return not Interrupts(seed, arguments.only, say).run(arguments.starts, arguments.beside)
    if arguments.command == "fleet":
        from tests.proof.soak.fleet import Fleet

        run = Fleet(seed, arguments.conversations, arguments.replicas, arguments.ingresses, say)
        return not run.run(60 * arguments.minutes)
    if arguments.command == "tabs":
        from tests.proof.soak.tabs import NoBrowserError, Tabs

        try:
            return not Tabs(seed, arguments.tabs, say).run(arguments.steps)
        except NoBrowserError as error:
            say(f"skipped: {error}")
            return 0
    from tests.proof.soak.kills import Kills

    return not Kills(seed, arguments.only, say).run(arguments.rounds)


if __name__ == "__main__":
    sys.exit(main())
