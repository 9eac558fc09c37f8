"""Options of the measurements that hold one conversation."""

import argparse


def conversation_parser(description: str | None, context: str, repetitions: int) -> argparse.ArgumentParser:
    """MODEL, and how long the conversation and its next message are; context: what the help says of the former."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=3000, help=context)
    parser.add_argument("--new", type=int, default=40, help="tokens of the next message")
    parser.add_argument("--repetitions", type=int, default=repetitions)
    return parser
