"""instructor: answers of a class, by tools, by a schema and by JSON, and one that comes piece by piece."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Pet(BaseModel):
    name: Literal["Tom", "Lily"]
    is_cat: bool


ASK = {"model": "demo", "messages": [{"role": "user", "content": "Tell me of a pet."}], "max_tokens": 80}
plain = OpenAI(base_url=f"{os.environ['URL']}/v1", api_key="none", max_retries=0)
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(plain, mode=mode)
    assert isinstance(client.chat.completions.create(**ASK, response_model=Pet, max_retries=1), Pet), mode
    parts = list(client.chat.completions.create_partial(**ASK, response_model=Pet))
    assert Pet(**parts[-1].model_dump()), mode
