"""The chat on a terminal."""

from localinfer.extras import require

require("chat", "the chat on a terminal")
