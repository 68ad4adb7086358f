"""How absorbed MLA is cut into programs: rows of queries, blocks of keys, and how many programs that makes."""

from dataclasses import dataclass, replace

import triton

from suite.kernels.ops.decode_attention import MIN_TILE
from suite.kernels.ops.interpreter import INTERPRETED

MAX_TILE = 64  # 64 rows of 512 fp32 sums are half of an SM's registers
MAX_SPLITS = 64  # what one merging program holds of a query


@dataclass(frozen=True, kw_only=True)
class MlaTile:
    """How one launch is cut: query-head rows per program, keys per block, warps, pipeline stages.

    `resident`: programs that fit a multiprocessor at once. `keys_first`: keys are the products' rows, not queries.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int = 1
    keys_first: bool = False


# rows of a tile -> its cut for sm_90. Rows of 512 + 64 bf16 are 36 KiB per block of 32; indices are fetched a stage
# before their rows, so 5 stages hold two blocks: 92 KiB for 16 rows, 111 KiB for 32, 181 KiB for 64
TILES = {
    16: MlaTile(rows=16, keys=32, warps=4, stages=5, resident=2),
    32: MlaTile(rows=32, keys=32, warps=8, stages=5, resident=2),
    64: MlaTile(rows=64, keys=32, warps=8, stages=5),
}


def tile_for(q_heads: int, max_query_len: int) -> MlaTile:
    """The cut for requests of up to `max_query_len` new tokens: a short request's queries share one tile."""
    rows = lanes_of(q_heads) * triton.next_power_of_2(max_query_len)
    tile = TILES[max(MIN_TILE, min(MAX_TILE, rows))]
    if not INTERPRETED:
        return tile
    # the interpreter pays per program, hardly per row
    return replace(tile, rows=max(MIN_TILE, min(512, rows)), keys=128)


def lanes_of(q_heads: int) -> int:
    """Heads of one tile, a power of two; more heads than these are served by further tiles."""
    return min(MAX_TILE, triton.next_power_of_2(q_heads))


def programs_per_split(q_heads: int, max_query_len: int) -> int:
    """Programs that one split of one request's keys takes."""
    lanes = lanes_of(q_heads)
    queries = tile_for(q_heads, max_query_len).rows // lanes
    return triton.cdiv(max_query_len, max(1, queries)) * triton.cdiv(q_heads, lanes)
