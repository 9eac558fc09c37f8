"""The op set: what a model may ask of a device, as plain records.

A decoder (package `models`) writes these ops once, in order, on a `GraphBuilder` (`graph_builder.py`), which checks the
shapes of each; a device turns the finished `OpGraph` into a `Program` that runs any batch (`cpu/lower/`,
`cuda/lower.py`). The NumPy oracle in `tests/support/oracle.py` runs the same records.

Shapes: a buffer holds `rows x width` float32, one row per token of the batch (`Rows.BATCH`) or per row whose logits
were asked for (`Rows.OUTPUT`). Every op works row by row, so the value of a row depends on nothing but its own prefix.
`out` may be the same buffer as an input wherever shapes agree, except in products and attention.
"""

from localinfer.kernels.ops.attention import (
    Attention as Attention,
)
from localinfer.kernels.ops.attention import (
    AttentionShape as AttentionShape,
)
from localinfer.kernels.ops.attention import (
    ChooseBlocks as ChooseBlocks,
)
from localinfer.kernels.ops.attention import (
    KVLayerShape as KVLayerShape,
)
from localinfer.kernels.ops.attention import (
    Pairing as Pairing,
)
from localinfer.kernels.ops.attention import (
    Relative as Relative,
)
from localinfer.kernels.ops.attention import (
    Rope as Rope,
)
from localinfer.kernels.ops.attention import (
    RopeTable as RopeTable,
)
from localinfer.kernels.ops.attention import (
    SparseSelection as SparseSelection,
)
from localinfer.kernels.ops.attention import (
    StoreKV as StoreKV,
)
from localinfer.kernels.ops.elementwise import (
    Activate as Activate,
)
from localinfer.kernels.ops.elementwise import (
    Activation as Activation,
)
from localinfer.kernels.ops.elementwise import (
    Add as Add,
)
from localinfer.kernels.ops.elementwise import (
    AddVector as AddVector,
)
from localinfer.kernels.ops.elementwise import (
    Clamp as Clamp,
)
from localinfer.kernels.ops.elementwise import (
    CopyHeads as CopyHeads,
)
from localinfer.kernels.ops.elementwise import (
    Embed as Embed,
)
from localinfer.kernels.ops.elementwise import (
    EmbedPositions as EmbedPositions,
)
from localinfer.kernels.ops.elementwise import (
    EmbedTypes as EmbedTypes,
)
from localinfer.kernels.ops.elementwise import (
    GatedActivate as GatedActivate,
)
from localinfer.kernels.ops.elementwise import (
    GaussianTopK as GaussianTopK,
)
from localinfer.kernels.ops.elementwise import (
    LayerNorm as LayerNorm,
)
from localinfer.kernels.ops.elementwise import (
    Magnitude as Magnitude,
)
from localinfer.kernels.ops.elementwise import (
    MeanRows as MeanRows,
)
from localinfer.kernels.ops.elementwise import (
    MixSlots as MixSlots,
)
from localinfer.kernels.ops.elementwise import (
    Multiply as Multiply,
)
from localinfer.kernels.ops.elementwise import (
    MultiplySigmoid as MultiplySigmoid,
)
from localinfer.kernels.ops.elementwise import (
    RmsNorm as RmsNorm,
)
from localinfer.kernels.ops.elementwise import (
    Scale as Scale,
)
from localinfer.kernels.ops.elementwise import (
    ScaleByPosition as ScaleByPosition,
)
from localinfer.kernels.ops.elementwise import (
    SelectOutput as SelectOutput,
)
from localinfer.kernels.ops.elementwise import (
    Softcap as Softcap,
)
from localinfer.kernels.ops.elementwise import (
    Xielu as Xielu,
)
from localinfer.kernels.ops.graph import (
    Op as Op,
)
from localinfer.kernels.ops.graph import (
    OpGraph as OpGraph,
)
from localinfer.kernels.ops.graph import (
    StageBoundary as StageBoundary,
)
from localinfer.kernels.ops.graph import (
    WeightSource as WeightSource,
)
from localinfer.kernels.ops.matmul import (
    MAX_EXPERTS as MAX_EXPERTS,
)
from localinfer.kernels.ops.matmul import (
    ExpertFactors as ExpertFactors,
)
from localinfer.kernels.ops.matmul import (
    ExpertMatmul as ExpertMatmul,
)
from localinfer.kernels.ops.matmul import (
    ExpertScale as ExpertScale,
)
from localinfer.kernels.ops.matmul import (
    ExpertSum as ExpertSum,
)
from localinfer.kernels.ops.matmul import (
    Gating as Gating,
)
from localinfer.kernels.ops.matmul import (
    HeadMatmul as HeadMatmul,
)
from localinfer.kernels.ops.matmul import (
    Matmul as Matmul,
)
from localinfer.kernels.ops.matmul import (
    Projection as Projection,
)
from localinfer.kernels.ops.matmul import (
    Route as Route,
)
from localinfer.kernels.ops.matmul import (
    Routing as Routing,
)
from localinfer.kernels.ops.records import (
    Buffer as Buffer,
)
from localinfer.kernels.ops.records import (
    EmbeddingTable as EmbeddingTable,
)
from localinfer.kernels.ops.records import (
    LinearWeight as LinearWeight,
)
from localinfer.kernels.ops.records import (
    Record as Record,
)
from localinfer.kernels.ops.records import (
    Rows as Rows,
)
from localinfer.kernels.ops.recurrent import (
    GatedDeltaRule as GatedDeltaRule,
)
from localinfer.kernels.ops.recurrent import (
    PreviousRow as PreviousRow,
)
from localinfer.kernels.ops.recurrent import (
    RecurrentOp as RecurrentOp,
)
from localinfer.kernels.ops.recurrent import (
    SelectiveScan as SelectiveScan,
)
from localinfer.kernels.ops.recurrent import (
    ShortConvolution as ShortConvolution,
)
from localinfer.kernels.ops.recurrent import (
    StateShape as StateShape,
)
from localinfer.kernels.ops.recurrent import (
    Wkv as Wkv,
)
from localinfer.kernels.ops.recurrent import (
    delta_rule_state as delta_rule_state,
)
from localinfer.kernels.ops.recurrent import (
    selective_scan_state as selective_scan_state,
)
from localinfer.kernels.ops.recurrent import (
    short_convolution_state as short_convolution_state,
)
from localinfer.kernels.ops.recurrent import (
    whole_vectors as whole_vectors,
)
from localinfer.kernels.ops.recurrent import (
    wkv_state as wkv_state,
)
