"""The chat on a terminal."""

from localinfer.system.extras import require

require("chat", "the chat on a terminal")
