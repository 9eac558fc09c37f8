"""What a user set for one model of a server, in place of what holds for all."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelSettings:
    """Settings of one model.

    load: arguments of `localinfer.load` in place of the server's. sampling: values by the names of SamplingParams,
    where a request says nothing. is_pinned: loaded when the server starts, and never unloaded. keep_alive_seconds: how
    long it stays loaded without requests, math.inf for ever; None as the server's others.
    """

    load: Mapping[str, Any] = field(default_factory=dict, hash=False)
    sampling: Mapping[str, float | int] = field(default_factory=dict, hash=False)
    is_pinned: bool = False
    keep_alive_seconds: float | None = None
