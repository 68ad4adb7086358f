"""What ran: device, driver, library versions, commit.

The parent asks only for the revision of the code, with the standard library. The child that
measures asks for everything; torch is imported only then.
"""

import functools
import hashlib
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from suite.records import Provenance, Record

ROOT = Path(__file__).resolve().parents[1]
NVIDIA_VERSION = Path("/sys/module/nvidia/version")
CPU_INFO = Path("/proc/cpuinfo")
GIT_TIMEOUT_S = 20
LIBRARIES = ("torch", "triton", "numpy", "flashinfer-python", "sglang-kernel")  # whose versions can change a result


class CodeRevision(Record):
    """A revision of this code. `patch_sha` hashes what was not committed and is empty when nothing was."""

    repo: str
    sha: str
    patch_sha: str
    branch: str | None
    dirty: bool


@functools.cache
def code_revision() -> CodeRevision:
    """The revision of the checkout that this code runs from; of the installed distribution when it is none."""
    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()).resolve() != ROOT:
        return CodeRevision(
            repo="kvproof", sha=f"v{library_version('kvproof')}", patch_sha="", branch=None, dirty=False
        )
    commit = (git("rev-parse", "--verify", "--quiet", "HEAD") or "none").strip()
    changes = (git("diff", "HEAD") or "") + untracked_sources()
    return CodeRevision(
        repo="kvproof",
        sha=commit,
        patch_sha=hashlib.sha256(changes.encode()).hexdigest()[:32] if changes else "",
        branch=(git("symbolic-ref", "--short", "--quiet", "HEAD") or "").strip() or None,
        dirty=bool(changes),
    )


def untracked_sources() -> str:
    """Sources that git does not know yet, each with the hash of its bytes; results and other files change no code."""
    names = (git("ls-files", "--others", "--exclude-standard", "--", "*.py", "*.toml", "*.yaml") or "").splitlines()
    found = [(name, ROOT / name) for name in names]
    return "".join(
        f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for name, path in found if path.is_file()
    )


def machine() -> dict[str, object]:
    """What a run's rows share by where they ran: the system, its GPUs and the libraries. Imports none of them."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "driver": NVIDIA_VERSION.read_text().strip() if NVIDIA_VERSION.exists() else None,
        "gpus": gpus(),
        **{name: library_version(name) for name in LIBRARIES},
    }


def gpus() -> list[str]:
    """The UUID of every GPU that nvidia-smi lists, in its order; none where there is no nvidia-smi."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"\(UUID: (GPU-[^)]+)\)", done.stdout)


def provenance(device: str, kernel_library: str | None = None) -> Provenance:
    """What runs in this process on `device` ("cpu" or "cuda"), with the distribution whose kernels are used."""
    import torch

    revision = code_revision()
    cuda = device == "cuda"
    return Provenance(
        python=platform.python_version(),
        torch=str(torch.__version__),  # a str that msgspec does not know as one
        triton=library_version("triton"),
        platform=platform.platform(),
        device_name=cuda_name() if cuda else cpu_name(),
        driver=NVIDIA_VERSION.read_text().strip() if cuda and NVIDIA_VERSION.exists() else None,
        cuda=torch.version.cuda,
        kernel_library=kernel_library,
        kernel_version=library_version(kernel_library) if kernel_library else None,
        commit=revision.sha,
        dirty=revision.dirty,
    )


def library_version(distribution: str) -> str:
    """The installed version of `distribution`, or "not installed"."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def cuda_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"


def cpu_name() -> str:
    """The processor's name as the kernel tells it, else its architecture."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def git(*arguments: str) -> str | None:
    """What git says in the checkout; None where it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_TIMEOUT_S,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
