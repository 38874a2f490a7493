"""The target keeps what a draft head reads of each token: its features, in one more cache.

    f_n   = the residual stream after layer n                              [B,S,h], n of three layers
    g     = F concat(rms(f_low), rms(f_middle), rms(f_high))               [B,S,h]
    feature_cache = TensorScatter(feature_cache, g, write_indices)         [B,1,C,h]

rms is RMSNormalization without a weight. The cache is written in place, moves and is trimmed like keys and values,
so features never leave the device, and those of a prompt are there when the head wants them.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from forerun.contract import cache_shape
from forerun.errors import ExportError
from forerun_export.passes.drop_layers import residual_stream
from forerun_export.passes.graph_tools import NodeWriter, Outcome, add_input, constant, graph_input, register


def apply(model: ir.Model, *, layers: Sequence[int], fuse: np.ndarray, epsilon: float) -> Outcome:
    """Add the cache to a target in contract form; `layers` count from 1, `fuse` is F, [h, 3h].

    Raises ExportError for layers that do not exist and for a model without a plain residual stream.
    """
    count = sum(str(value.name).startswith("k_cache.") for value in model.graph.inputs)
    if outside := [layer for layer in layers if not 1 <= layer <= count]:
        raise ExportError(f"the head reads layers {outside}, the target has 1 to {count}; use a head that fits it")
    stream = residual_stream(model, count)
    size = len(fuse)
    cache = add_input(model, "feature_cache", ir.DataType.FLOAT, cache_shape(1, size))
    last = stream[2 * max(layers)].producer()
    with NodeWriter(model.graph, after=last) as w:
        ones = constant(model.graph, "features.ones", np.ones(size, np.float32))
        parts = [w.op("RMSNormalization", stream[2 * layer], ones, epsilon=epsilon, axis=-1) for layer in layers]
        matrix = register(model.graph, ir.tensor(np.ascontiguousarray(fuse.T), name="features.fuse.weight_t"))
        features = w.op("MatMul", w.op("Concat", *parts, axis=-1), matrix, name="features")
        new = w.op("Unsqueeze", features, w.integers(1))
        write = graph_input(model, "write_indices")
        written = w.op("TensorScatter", cache, new, write, axis=2, name="feature_cache_out")
    written.type, written.shape = cache.type, cache.shape
    model.graph.outputs.append(written)
    return Outcome(True)
