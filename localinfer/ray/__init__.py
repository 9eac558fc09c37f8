"""Ray Serve: several replicas of a model behind one address. `app` builds an application, `demo` is one."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localinfer.apps.fleet.application import app as app

__all__ = ["app", "demo"]


def __getattr__(name: str) -> Any:
    """Import Ray when it is first needed. Raises: MissingPackageError."""
    if name not in __all__:
        raise AttributeError(f"module 'localinfer.ray' has no attribute {name!r}")
    from localinfer.system.extras import require

    require("ray", "localinfer.ray")
    from localinfer.apps.fleet import application

    return application.app if name == "app" else application.demo()
