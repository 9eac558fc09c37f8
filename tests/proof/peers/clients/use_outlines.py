"""Outlines over HTTP: a class by OpenAI's API, and a choice, a class and a regular expression by vLLM's members."""

import json
import os
from typing import Literal

import openai
import outlines
from outlines.types import Regex
from pydantic import BaseModel


class Pet(BaseModel):
    name: Literal["Tom", "Lily"]
    is_cat: bool


client = openai.OpenAI(base_url=f"{os.environ['URL']}/v1", api_key="none", max_retries=0)
LIMIT = {"max_tokens": 60}
by_openai = outlines.from_openai(client, "demo")
assert by_openai("Tell me a story.", **LIMIT)
assert Pet(**json.loads(by_openai("A pet?", Pet, **LIMIT)))
assert "".join(by_openai.stream("Tell me a story.", **LIMIT))
by_vllm = outlines.from_vllm(client, "demo")
assert Pet(**json.loads(by_vllm("A pet?", Pet, **LIMIT)))
assert by_vllm("Cat or dog?", Literal["cat", "dog"], **LIMIT) in ("cat", "dog")
assert by_vllm("A number?", Regex("[0-9]{3}"), **LIMIT).isdigit()
