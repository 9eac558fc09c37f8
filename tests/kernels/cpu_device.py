"""The CPU as a device of the architecture tests: packed weights, a tape and cache pages, from a reference reader."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.arrays import address, aligned_zeros
from localinfer.kernels.cpu.embedding import RowTable
from localinfer.kernels.cpu.layouts import Layout
from localinfer.kernels.cpu.packing import pack
from localinfer.kernels.cpu.pool import ThreadPool
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import EmbeddingTable, FloatArray, KVLayerShape, LinearWeight, Tape, WeightSource
from localinfer.quant.gguf import GGUFFile, read_gguf
from localinfer.quant.reference import dequantize
