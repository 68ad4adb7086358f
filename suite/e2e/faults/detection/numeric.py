"""Numeric faults: the right rows, and the wrong arithmetic on them. Both arms would agree, so dense attention must say.

Where a fault stands in the oracle, the faulty arm alone runs it: what a vendor's kernel does wrong shows like this.
"""

from dataclasses import replace
from typing import Any

import torch

from suite.e2e.faults.detection.layers import EAGER, EAGER_PAGE_TABLE, INTERPRETED, PAGE_TABLE, REFERENCE, layers
from suite.e2e.faults.fault import plants

EXECUTE, ATTEND = "suite.kernels.attention.fa3:execute", "suite.kernels.attention.reference:attend"
INACCURATE, DIFFERS = "kernel.inaccurate", "judge.outputs_differ"
SERVED, TABLES = layers(REFERENCE), layers(PAGE_TABLE)


def with_window(own: Any, change: int) -> Any:
    def execute(metadata: Any, layer: Any, q: torch.Tensor, pool: Any) -> torch.Tensor:
        window = None if layer.window is None else layer.window + change
        return own(metadata, replace(layer, window=window), q, pool)

    return execute


@plants("numeric", EXECUTE, TABLES, INACCURATE, source="B22", severity=1)
def window_one_too_wide(own: Any) -> Any:
    """window layers see W + 1 positions: the bound is inclusive on both sides"""
    return with_window(own, 1)


@plants("numeric", EXECUTE, TABLES, INACCURATE, source="B22", severity=1)
def window_one_too_narrow(own: Any) -> Any:
    """window layers see W - 1 positions"""
    return with_window(own, -1)


@plants("numeric", EXECUTE, TABLES, INACCURATE, source="B21")
def window_missing_at_plan(own: Any) -> Any:
    """the window is left out when the kernel is planned: window layers see all of the prefix, tombstones too"""
    return lambda metadata, layer, q, pool: own(metadata, replace(layer, window=layer.window and 10_000), q, pool)


@plants("numeric", ATTEND, SERVED, INACCURATE, source="B23", smoke=True)
def sinks_dropped(own: Any) -> Any:
    """the learned sinks do not reach the kernel, which takes softmax without them"""
    return lambda q, k, v, layer, *rest: own(q, k, v, replace(layer, sinks=None), *rest)


@plants("numeric", ATTEND, SERVED, INACCURATE, source="B23")
def sinks_counted_twice(own: Any) -> Any:
    """each of two splits adds the sink to the denominator"""
    return lambda q, k, v, layer, *rest: own(
        q, k, v, replace(layer, sinks=layer.sinks + torch.log(torch.tensor(2.0))), *rest
    )


@plants("numeric", ATTEND, SERVED, INACCURATE)
def sinks_in_the_order_of_kv_heads(own: Any) -> Any:
    """sinks are taken group by group where the kernel goes head by head"""
    return lambda q, k, v, layer, *rest: own(
        q, k, v, replace(layer, sinks=layer.sinks.view(layer.kv_heads, -1).T.flatten()), *rest
    )


@plants("numeric", ATTEND, SERVED, INACCURATE, severity=0.01)
def softmax_scale_off(own: Any) -> Any:
    """the softmax scale is 1 % off"""
    return lambda q, k, v, layer, *rest: own(q, k, v, replace(layer, scale=layer.scale * 1.01), *rest)


@plants("numeric", ATTEND, SERVED, INACCURATE)
def query_heads_grouped_in_reverse(own: Any) -> Any:
    """the groups of query heads are dealt to the KV heads in reverse"""

    return lambda q, k, v, *rest: own(q, k.flip(1), v.flip(1), *rest)


@plants("numeric", ATTEND, SERVED, INACCURATE, source="B21")
def causal_bound_one_too_late(own: Any) -> Any:
    """a query of a prefill sees the key behind its own"""
    return lambda q, k, v, layer, first, *rest: own(q, k, v, layer, first + (q.shape[0] > 1), *rest)


@plants("numeric", ATTEND, SERVED, INACCURATE, severity=2**-8)
def weights_kept_in_bf16(own: Any) -> Any:
    """fp32 rows are attended to in bf16"""
    return lambda q, k, v, layer, first, *rest: own(q.bfloat16(), k.bfloat16(), v.bfloat16(), layer, first, *rest)


@plants("numeric", ATTEND, SERVED, INACCURATE, DIFFERS, source="B45", severity=1e-3)
def noise_on_the_outputs(own: Any) -> Any:
    """outputs carry noise of a thousandth, as a kernel has that reads a little of what it should not"""

    def noisy(*asked: Any) -> torch.Tensor:
        out: torch.Tensor = own(*asked)
        return out + 1e-3 * torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)

    return noisy


@plants("numeric", "suite.kernels.pools:write_kv", layers(EAGER), INACCURATE, DIFFERS, source="B25", severity=0.5)
def keys_scaled_at_write_only(own: Any) -> Any:
    """keys are divided by their scale when written and not multiplied by it when read"""
    return lambda k_view, v_view, ids, k, v, *scales: own(k_view, v_view, ids, k / 2, v, *scales)


@plants("numeric", "suite.kernels.pools:write_kv", layers(EAGER_PAGE_TABLE), INACCURATE, DIFFERS)
def values_stored_as_keys(own: Any) -> Any:
    """the value rows are a second copy of the keys"""
    return lambda k_view, v_view, ids, k, v, *scales: own(k_view, v_view, ids, k, k, *scales)


@plants(
    "numeric", "suite.kernels.attention.triton:decode_attention", layers(INTERPRETED), INACCURATE, DIFFERS, source="B23"
)
def sinks_dropped_by_the_decode_kernel(own: Any) -> Any:
    """our own decode kernel is launched without the sinks"""
    return lambda q, k, v, indptr, indices, scale, sinks, *rest: own(q, k, v, indptr, indices, scale, None, *rest)
