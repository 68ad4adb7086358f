"""Every linear-attention kernel compiles for sm_90, on a machine without a GPU.

The interpreter accepts what a compiler refuses: tiles too small, pointers of the wrong shape, values that change
type in a loop. Triton compiles for a named target without a driver, so this is seen here.
"""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

class Hopper:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=0: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    is_active = staticmethod(lambda: True)

driver.set_active(Hopper())
launch, limit = jit.JITFunction.run, 227 * 1024

def compile_only(self, *args, grid, warmup, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    assert kernel.asm["cubin"], self.__name__
    assert kernel.metadata.shared <= limit, (self.__name__, kernel.metadata.shared)
    print(self.__name__)

jit.JITFunction.run = compile_only
from tests.linear_rig import LinearRig

for family in ("gdn", "kda", "lightning"):
    rig = LinearRig(family, dtype=torch.bfloat16, k_dim=32, v_dim=32, layers=(1,))
    from suite.kernels.linear.base import TRITON_OPS
    rig.backend.ops = TRITON_OPS
    rig.backend.reserve_verify(2, 3)
    parents = torch.zeros(2, 3, dtype=torch.int32)
    forwards = {
        "gdn": [({1: 1}, {}), ({1: 2, 2: 3}, {})],
        "kda": [({1: 2, 2: 3}, {}), ({1: 3, 2: 3}, {"verify": True, "parents": parents})],
        "lightning": [({1: 2, 2: 3}, {})],
    }
    for work, how in forwards[family]:
        _, metadata = rig.plan(work, **how)
        rig.backend.forward(rig.model[1], rig.inputs(sum(work.values())), metadata)
from suite.kernels.ops.state_rows import copy_rows_triton
rows = torch.zeros(1, 2, 8)
copy_rows_triton(rows, torch.tensor([0]), rows, torch.tensor([1]))
"""
KERNELS = {
    "_causal_conv_kernel",
    "_delta_gates_kernel",
    "_delta_step_kernel",
    "_local_kernel",
    "_head_scores_kernel",
    "_channel_scores_kernel",
    "_solve_kernel",
    "_states_kernel",
    "_outputs_kernel",
    "_copy_rows_kernel",
}


def test_kernels_compile_for_hopper(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[1],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == KERNELS
