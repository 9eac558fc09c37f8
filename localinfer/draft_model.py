"""Drafts of a small model of the same vocabulary, with pages and prefixes of its own."""

import time

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import Batch, Segment
from localinfer.kv_cache import KVCache
from localinfer.page_pool import default_kv_memory
from localinfer.prefix_cache import CacheUse, PrefixCache
from localinfer.sampling import Sampler, SamplingPlan

_USE = CacheUse()
_CLOCK_MEMORY = 0.9
_FIRST_ROW = np.zeros(1, np.int32)
_NO_ROWS = np.zeros(0, np.int32)
