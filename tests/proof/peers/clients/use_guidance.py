"""guidance over HTTP: text and JSON of a schema."""

import json
import os

import guidance
from guidance import assistant, user

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tom", "Lily"]}},
    "required": ["name"],
    "additionalProperties": False,
}
model = guidance.models.OpenAI("demo", base_url=f"{os.environ['URL']}/v1", api_key="none", echo=False)
with user():
    model += "Tell me a story."
with assistant():
    model += guidance.gen("story", max_tokens=20)
assert model["story"]
with user():
    model += "Tell me of a pet."
with assistant():
    model += guidance.json("pet", schema=SCHEMA)
assert json.loads(model["pet"])["name"] in ("Tom", "Lily")
