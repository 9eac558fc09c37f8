"""A program that pulls a model from a stand-in of the hub."""

PULL = """
import sys
from pathlib import Path
from tests.storage.hub.stand_in import places_in
from localinfer.storage.hub.pull import pull_model, read_reference
places = places_in(Path(sys.argv[1]), sys.argv[2])
print(pull_model(read_reference(sys.argv[3]), places, say=lambda line: print(line, flush=True)).name, flush=True)
"""
"""Its arguments: a folder for all places, the hub's address, and what to pull. The last line is the model's name."""
