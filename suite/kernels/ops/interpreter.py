"""Whether Triton kernels of this process are compiled or interpreted.

Triton decides when a kernel's module is imported, from `TRITON_INTERPRET`. Setting the variable later
gives a mix that fails deep inside Triton, so the truth is read off Triton's own library functions.
"""

import triton
import triton.language as tl

INTERPRETED: bool = not isinstance(tl.sum, triton.JITFunction)


def interpreter_reason(name: str) -> str | None:
    """Why backend `name` cannot run under the interpreter in this process; None when it can."""
    if INTERPRETED and triton.knobs.runtime.interpret:
        return None
    got = "it set too late" if triton.knobs.runtime.interpret else "it unset"
    return f"{name}: needs TRITON_INTERPRET=1 before triton is imported, got {got}"
