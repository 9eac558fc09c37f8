"""The op set: what a model may ask of a device, as plain records.

A decoder (package `models`) writes these ops once, in order, on a `GraphBuilder` (`graph_builder.py`), which checks the
shapes of each; a device turns the finished `OpGraph` into a `Program` that runs any batch (`cpu/lower/`,
`cuda/lower.py`). The NumPy oracle in `tests/support/oracle.py` runs the same records.

Shapes: a buffer holds `rows x width` float32, one row per token of the batch (`Rows.BATCH`) or per row whose logits
were asked for (`Rows.OUTPUT`). Every op works row by row, so the value of a row depends on nothing but its own prefix.
`out` may be the same buffer as an input wherever shapes agree, except in products and attention.
"""

from localinfer.kernels.ops.attention import (
    NUM_AXES as NUM_AXES,
    Attention as Attention,
    AttentionShape as AttentionShape,
    ChooseBlocks as ChooseBlocks,
    KVLayerShape as KVLayerShape,
    Pairing as Pairing,
    Relative as Relative,
    Rope as Rope,
    RopeTable as RopeTable,
    RotateByRow as RotateByRow,
    SparseSelection as SparseSelection,
    StoreKV as StoreKV,
)
from localinfer.kernels.ops.elementwise import (
    Activate as Activate,
    Activation as Activation,
    Add as Add,
    AddVector as AddVector,
    Bound as Bound,
    Clamp as Clamp,
    CopyHeads as CopyHeads,
    Embed as Embed,
    EmbedMedia as EmbedMedia,
    EmbedPositions as EmbedPositions,
    EmbedTypes as EmbedTypes,
    GatedActivate as GatedActivate,
    GaussianTopK as GaussianTopK,
    LayerNorm as LayerNorm,
    Magnitude as Magnitude,
    MeanRows as MeanRows,
    MixSlots as MixSlots,
    Multiply as Multiply,
    MultiplySigmoid as MultiplySigmoid,
    RmsNorm as RmsNorm,
    Scale as Scale,
    ScaleByPosition as ScaleByPosition,
    SelectOutput as SelectOutput,
    Softcap as Softcap,
    Softmax as Softmax,
    Xielu as Xielu,
)
from localinfer.kernels.ops.graph import (
    Op as Op,
    OpGraph as OpGraph,
    StageBoundary as StageBoundary,
    WeightSource as WeightSource,
)
from localinfer.kernels.ops.matmul import (
    MAX_EXPERTS as MAX_EXPERTS,
    ExpertFactors as ExpertFactors,
    ExpertMatmul as ExpertMatmul,
    ExpertScale as ExpertScale,
    ExpertSum as ExpertSum,
    Gating as Gating,
    HeadMatmul as HeadMatmul,
    Matmul as Matmul,
    Projection as Projection,
    Route as Route,
    Routing as Routing,
)
from localinfer.kernels.ops.records import (
    Buffer as Buffer,
    EmbeddingTable as EmbeddingTable,
    LinearWeight as LinearWeight,
    OpRecord as OpRecord,
    Rows as Rows,
)
from localinfer.kernels.ops.recurrent import (
    CentredConvolution as CentredConvolution,
    GatedDeltaRule as GatedDeltaRule,
    PreviousRow as PreviousRow,
    RecurrentOp as RecurrentOp,
    SelectiveScan as SelectiveScan,
    ShortConvolution as ShortConvolution,
    StateShape as StateShape,
    Wkv as Wkv,
    delta_rule_state as delta_rule_state,
    selective_scan_state as selective_scan_state,
    short_convolution_state as short_convolution_state,
    whole_vectors as whole_vectors,
    wkv_state as wkv_state,
)
