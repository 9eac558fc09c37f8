"""Calls of Serve's handles that are no part of the client's request during which they are made.

Serve gives every call that is made during a request the request's id, and takes two calls of a deployment with one id
for the same: of two that wait for a replica the first gets the one that was chosen for the second, which is never sent.
It also cancels them when the client leaves. An ingress asks whether a replica lives while the request that found it
silent goes on elsewhere, and reports for all requests from a task that the first one started.
"""

from collections.abc import Callable
from contextvars import Context
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def call_apart(call: Callable[Arguments, Result], *values: Arguments.args, **options: Arguments.kwargs) -> Result:
    """Call something where no request is known, by which Serve gives the call an id of its own."""
    return Context().run(call, *values, **options)
