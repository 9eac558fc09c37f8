"""Names of requests and replies: unlike one another, and no secrets."""

import random

_source = random.Random()


def identifier(prefix: str) -> str:
    """The prefix and 24 hexadecimal digits.

    The system is asked for none of them: such a call lets go of the interpreter's lock, and the event loop would wait
    to have it back from threads that compute, up to a millisecond each time.
    """
    return f"{prefix}-{_source.getrandbits(96):024x}"
