"""Attention over caches that grow by concatenation, as Optimum traces it, written anew over a static cache.

A layer is recognised by its dataflow: the Concat of past_key_values.N.key with the new keys, the product of queries
and keys, the softmax, the product with the values. What lies between them (repeated heads, transposes, scales, masks,
guards against NaN) is not matched but run by itself, and must do what the layer that is written does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from forerun.errors import ExportError
from forerun_export.passes.attention_masks import RefusedError, ScoreRule, read_rule
from forerun_export.passes.evaluation import Array, Piece, constant_array
from forerun_export.passes.fixed_sizes import heads_of
from forerun_export.passes.graph_tools import Outcome, add_input, nodes_of
from forerun_export.passes.sides import Run, data_values, past_inputs, past_shape
from forerun_export.passes.static_attention import AttentionLayer, NewEntries, write

_RUN = Run(batch=2, new=3, past=4)


@dataclass(frozen=True)
class _Operand:
    """A side of a product that comes from a cache: `repeats` times `factor` times the concatenated cache."""

    entries: NewEntries
    layer: int
    repeats: int
    factor: float
    ranks: int


def apply(model: ir.Model, *, context: int, softcap: float | None = None) -> Outcome:
    """Rewrite every layer; `softcap` is where the configuration caps scores.

    Raises ExportError, naming the layer and the reason, where one cannot be expressed.
    """
    if not past_inputs(model):
        return Outcome(False, "the graph has no past_key_values.N.key inputs (task text-generation-with-past)")
    layers: list[AttentionLayer] = []
    for layer in read_layers(model, context=context):
        if isinstance(layer, ExportError):
            raise layer
        layers.append(layer)
    _check_softcap(layers, softcap)
    add_input(model, "write_indices", ir.DataType.INT64, ["B"])
    write(model, layers)
    return Outcome(True)


def _check_softcap(layers: list[AttentionLayer], softcap: float | None) -> None:
    """Optimum's default attention leaves the cap out, without a word."""
    if softcap and any(abs(layer.softcap / softcap - 1) > 1e-4 for layer in layers):
        caps = sorted({layer.softcap for layer in layers})
        raise ExportError(
            f"the configuration caps attention scores at {softcap} (attn_logit_softcapping), the graph at {caps}: "
            "another attention than eager leaves the cap out; export it with attn_implementation eager"
        )


def read_layers(model: ir.Model, *, context: int) -> list[AttentionLayer | ExportError]:
    """Every layer in order, or why it cannot be expressed."""
    found: dict[int, AttentionLayer | ExportError] = {}
    for layer in _find(model, context):
        try:
            found[layer.number] = layer.read()
        except ExportError as error:
            found[layer.number] = error
    for number in {number for number, _ in past_inputs(model)} - set(found):
        found[number] = ExportError(
            f"no attention was recognised over the cache past_key_values.{number}.key (a product with the "
            "concatenated keys, a softmax, a product with the values); use another front end"
        )
    return [found[number] for number in sorted(found)]


def _find(model: ir.Model, context: int) -> Iterator["_Found"]:
    """The layers behind all softmaxes whose scores are a product with concatenated keys."""
    data = data_values(model)
    for softmax in nodes_of(model, "Softmax"):
        product = _product_behind(softmax.inputs[0], data)
        if product is not None and (concat := _cache_behind(product.inputs[1], data)) is not None:
            yield _Found(model, data, context, softmax, product, concat)


def _product_behind(value: ir.Value | None, data: set[ir.Value]) -> ir.Node | None:
    """The MatMul from which `value` comes through nodes with one data input each."""
    while value is not None and (node := value.producer()) is not None and node.op_type != "MatMul":
        value = _one_data_input(node, data)
    return value.producer() if value is not None else None


def _one_data_input(node: ir.Node, data: set[ir.Value]) -> ir.Value | None:
    inputs = {source for source in node.inputs if source is not None and source in data}
    return inputs.pop() if len(inputs) == 1 else None


def _cache_behind(value: ir.Value | None, data: set[ir.Value]) -> ir.Node | None:
    """The Concat of a cache with new entries from which `value` comes through nodes with one data input each."""
    caches = set()
    while value is not None and (node := value.producer()) is not None:
        caches = {source for source in node.inputs if source is not None and source.is_graph_input()} & data
        if node.op_type == "Concat" and caches:
            return node
        value = _one_data_input(node, data)
    return None


class _Found:
    """One attention layer of the traced graph."""

    def __init__(
        self, model: ir.Model, data: set[ir.Value], context: int, softmax: ir.Node, product: ir.Node, concat: ir.Node
    ) -> None:
        self._model, self._data, self._context = model, data, context
        self._softmax, self._product, self._concat = softmax, product, concat
        names = {value: number for (number, _), value in past_inputs(model).items()}
        self.number = next((names[source] for source in concat.inputs if source in names), -1)

    def read(self) -> AttentionLayer:
        """The layer for the writer. Raises ExportError if it cannot be expressed."""
        try:
            return self._read()
        except RefusedError as error:
            raise ExportError(
                f"attention layer {self.number} cannot be converted: {error} "
                f"(softmax {self._softmax.name}); use another front end"
            ) from None

    def _read(self) -> AttentionLayer:
        keys = self._operand(self._concat, self._product.inputs[1], transposed=True)
        mixing = self._mixing()
        concat = _cache_behind(mixing.inputs[1], self._data)
        assert concat is not None
        values = self._operand(concat, mixing.inputs[1], transposed=False)
        heads, size = self._numbers(keys, values)
        self._prove_weights(mixing, heads, keys.ranks)
        query, query_factor = self._query(heads, size, keys.ranks)
        rule = self._rule(heads, keys.ranks, keys.factor * query_factor)
        return AttentionLayer(
            before=mixing,
            query=query,
            keys=keys.entries,
            values=values.entries,
            output=self._output(mixing, heads, size, keys.ranks),
            heads_first=True,
            query_heads=heads,
            kv_heads=past_shape(keys.entries.cache)[1],
            head_size=size,
            scale=rule.scale,
            softcap=rule.softcap,
            visibility=rule.visibility,
        )

    def _numbers(self, keys: _Operand, values: _Operand) -> tuple[int, int]:
        """How many query heads there are, and the size of a head."""
        shapes = [past_shape(operand.entries.cache) for operand in (keys, values)]
        alike = (keys.layer, keys.repeats, keys.ranks) == (values.layer, values.repeats, values.ranks)
        if not alike or shapes[0] != shapes[1]:
            raise RefusedError("its keys and values are laid out differently")
        if values.factor != 1:
            raise RefusedError(f"its values are multiplied by {values.factor}")
        _, kv_heads, _, size = shapes[0]
        heads = heads_of(self._product.outputs[0])
        if heads is None or kv_heads * keys.repeats not in (1, heads):  # one KV head is shared by broadcasting
            raise RefusedError(f"{heads} query heads do not fit {kv_heads} KV heads repeated {keys.repeats} times")
        return heads, size

    def _rule(self, heads: int, ranks: int, factor: float) -> ScoreRule:
        scores = self._softmax.inputs[0]
        assert scores is not None
        raw = self._product.outputs[0]
        return read_rule(
            self._model, raw=raw, final=scores, heads=heads, ranks=ranks, context=self._context, key_factor=factor
        )

    def _operand(self, concat: ir.Node, operand: ir.Value | None, *, transposed: bool) -> _Operand:
        """What a product reads of a cache, proven on random numbers."""
        entries, layer = self._entries(concat)
        _, heads, _, size = past_shape(entries.cache)
        shape = (_RUN.batch, heads, _RUN.past + _RUN.new, size)
        cache = np.random.default_rng(layer).standard_normal(shape).astype(np.float32)
        assert operand is not None
        piece = Piece(self._model, [operand], [entries.written])
        found = piece.run({**_RUN.feeds(piece.inputs), entries.written: cache})[0]
        repeats, rest = divmod(found.size, cache.size)
        expected = np.repeat(cache, max(repeats, 1), axis=1)
        expected = expected.swapaxes(2, 3) if transposed else expected
        if rest or found.ndim not in (3, 4) or found.shape[-2:] != expected.shape[-2:]:
            raise RefusedError(f"its {entries.cache.name} reaches the product in another layout")
        ranks, found = found.ndim, found.reshape(expected.shape)
        factor = float(np.median(found.astype(np.float64) / expected))
        factor = 1.0 if abs(factor - 1) < 1e-6 else factor
        if not np.allclose(found, expected * factor, rtol=1e-5, atol=1e-6):
            raise RefusedError(f"its {entries.cache.name} reaches the product changed, or its heads in another order")
        return _Operand(entries, layer, repeats, factor, ranks)

    def _entries(self, concat: ir.Node) -> tuple[NewEntries, int]:
        names = {value: number for (number, _), value in past_inputs(self._model).items()}
        old, new = concat.inputs if len(concat.inputs) == 2 else (None, None)
        if old is None or old not in names or new is None or concat.attributes.get_int("axis", 0) not in (-2, 2):
            raise RefusedError(f"its cache is not [past, new] along the tokens (node {concat.name})")
        return NewEntries(new, old, concat.outputs[0]), names[old]

    def _mixing(self) -> ir.Node:
        """The product of the softmax with the values."""
        waiting = list(self._softmax.outputs[0].consumers())
        for node in waiting:
            if node.op_type == "MatMul" and _cache_behind(node.inputs[1], self._data) is not None:
                return node
            if node.op_type != "MatMul" and len(waiting) < 32:
                waiting += [reader for value in node.outputs for reader in value.consumers()]
        raise RefusedError("no product of its softmax with a concatenated value cache was found")

    def _prove_weights(self, mixing: ir.Node, heads: int, ranks: int) -> None:
        """What meets the values is the softmax of the scores and nothing else (guards against NaN do nothing)."""
        raw, scores = self._product.outputs[0], self._softmax.inputs[0]
        weights = mixing.inputs[0]
        assert scores is not None
        assert weights is not None
        self._refuse_other_data(weights)
        leading = (_RUN.batch * heads,) if ranks == 3 else (_RUN.batch, heads)
        shape = (*leading, _RUN.new, _RUN.past + _RUN.new)
        some = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        piece = Piece(self._model, [scores, weights], [raw])
        before, after = piece.run({**_RUN.feeds(piece.inputs), raw: some})
        expected = np.exp(before - before.max(axis=-1, keepdims=True))
        expected /= expected.sum(axis=-1, keepdims=True)
        same = after.size == expected.size
        if not same or not np.allclose(after.reshape(expected.shape), expected, rtol=1e-4, atol=1e-6):
            raise RefusedError("its values are not weighted by the softmax of its scores alone")

    def _refuse_other_data(self, weights: ir.Value) -> None:
        """Nothing but the softmax's output may come in on the way to the values."""
        softmax = self._softmax.outputs[0]
        made = {softmax}
        for node in Piece(self._model, [weights], [softmax]).nodes:
            is_data = any(output in self._data for output in node.outputs)
            if is_data and any(source in self._data and source not in made for source in node.inputs):
                raise RefusedError(f"its weights depend on something else (node {node.name}, {node.op_type})")
            if any(source in made for source in node.inputs):
                made.update(node.outputs)

    def _query(self, heads: int, size: int, ranks: int) -> tuple[ir.Value, float]:
        """The queries [B,heads,S,D], and the constant that the graph multiplies them with."""
        value, factor = self._product.inputs[0], 1.0
        while value is not None and (node := value.producer()) is not None:
            source = _one_data_input(node, self._data)
            if node.op_type == "Mul" and source is not None and (number := self._scalar(node, source)) is not None:
                value, factor = source, factor * number
            elif node.op_type == "Reshape" and ranks == 3 and source is not None:
                self._prove_reshape(source, value, (_RUN.batch, heads, _RUN.new, size))
                value, ranks = source, 4
            else:
                break
        if value is None or ranks != 4:
            raise RefusedError("its queries are not laid out as [batch,heads,tokens,head size]")
        return value, factor

    def _scalar(self, node: ir.Node, source: ir.Value) -> float | None:
        """The constant that a node multiplies its data with, if it is a single number."""
        other = node.inputs[1] if node.inputs[0] is source else node.inputs[0]
        array = constant_array(self._model, other) if other is not None and other not in self._data else None
        return float(array.item()) if array is not None and array.size == 1 else None

    def _prove_reshape(self, before: ir.Value, after: ir.Value, shape: tuple[int, ...]) -> None:
        """From [B,heads,S,D] to [B*heads,S,D] or back, in order."""
        some: Array = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        piece = Piece(self._model, [after], [before])
        found = piece.run({**_RUN.feeds(piece.inputs), before: some})[0]
        if found.size != some.size or not np.array_equal(found.ravel(), some.ravel()):
            raise RefusedError(f"its heads are mixed on the way to {after.name}")

    def _output(self, mixing: ir.Node, heads: int, size: int, ranks: int) -> ir.Value:
        """The mixed values [B,heads,S,D]."""
        value = mixing.outputs[0]
        if ranks == 4:
            return value
        readers = [node for node in value.consumers() if node.op_type != "Shape"]
        if len(readers) != 1 or readers[0].op_type != "Reshape":
            raise RefusedError("its output is not laid out as [batch,heads,tokens,head size]")
        after = readers[0].outputs[0]
        self._prove_reshape(value, after, (_RUN.batch * heads, _RUN.new, size))
        return after
