"""Log records as lines of JSON, for programs that collect logs: when, how grave, what, and the facts of a request."""

import json
import logging
import sys
import time
from typing import Any

LOGGER = "localinfer"
"""Above every logger of this program."""


class JsonFormatter(logging.Formatter):
    """One object per record: `time`, `level`, `logger`, `message`, and what the record has as `facts`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(*, as_json: bool, verbose: bool) -> None:
    """Write this program's log to standard error, as text or as JSON. verbose: requests too, which JSON always has.

    Text without `verbose` is what Python does anyway.
    """
    if not as_json and not verbose:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger(LOGGER if as_json else f"{LOGGER}.server")
    logger.addHandler(handler)
    logger.propagate = False
    logging.getLogger(f"{LOGGER}.server").setLevel(logging.INFO)
