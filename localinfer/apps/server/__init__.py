"""The local server: OpenAI's and Anthropic's wire formats over HTTP, on a Unix socket and on the loopback interface."""

from localinfer.system.extras import require

require("server", "the server")
