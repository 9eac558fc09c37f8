"""A cluster of Ray on this machine with one application, which takes lines of JSON: `serve_process` starts it.

`settings` are those of `ServerSettings`, with the tokens as the text of a `token_file`.
"""

import json
import os
import socket
import sys
from typing import Any


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[1])
    folder, num_cpus, settings = options.pop("folder"), options.pop("num_cpus"), options.pop("settings", None)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Serve kills a proxy that takes longer to start, which on a busy machine all of them do.
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "55"
    # What Ray prints, from C++ too, is for people.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    import ray
    from ray import serve
    from ray.serve.exceptions import DeploymentUnavailableError

    import localinfer.ray
    from localinfer.apps.server.transport.settings import ServerSettings, parse_tokens
    from localinfer.storage.response_store import ResponseStoreOptions

    if settings is not None:
        tokens = parse_tokens(settings.pop("token_file"))
        kept = ResponseStoreOptions(max_bytes=0)
        options["settings"] = ServerSettings(tokens=tokens, kept_responses=kept, serves_page=False, **settings)
    port = free_port()
    ray.init(
        num_cpus=num_cpus, include_dashboard=False, _temp_dir=folder, object_store_memory=80 << 20, log_to_driver=False
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})

        def deploy(**more: Any) -> None:
            serve.run(localinfer.ray.app(**{**options, **more}), name="test", route_prefix="/")

        deploy()
        say({"port": port})
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["do"] == "deploy":
                deploy(**asked["options"])
                answer: Any = "deployed"
            else:
                replicas = serve.get_deployment_handle(asked["deployment"], app_name="test")
                try:
                    answer = replicas.broadcast("running").results(timeout_s=30, return_exceptions=True)
                except DeploymentUnavailableError:
                    # The last one is gone, and the next not there.
                    answer = []
                answer = [one for one in answer if not isinstance(one, BaseException)]
            say(answer)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
