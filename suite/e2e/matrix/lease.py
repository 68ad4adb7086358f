"""Who executes a run: a process, named so that another one can tell whether it is still alive.

On the same boot of the same host the process table answers. From anywhere else only the heartbeat
can: without one for `SILENCE_S` seconds the owner counts as gone.
"""

import datetime
import os
import socket
from pathlib import Path

from suite.e2e.matrix.spool import began

HEARTBEAT_S = 10.0
SILENCE_S = 60.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot() -> str:
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else "unknown"


def owner() -> str:
    """This process: host, boot, process id and when it began."""
    return f"{socket.gethostname()} {boot()} {os.getpid()} {began(os.getpid())}"


def alive(owner: str, heartbeat_at: datetime.datetime, now: datetime.datetime) -> bool:
    """Whether the process `owner` still executes its run."""
    host, boot_id, pid, when = owner.split()
    if (host, boot_id) == (socket.gethostname(), boot()):
        return began(int(pid)) == when
    return (now - heartbeat_at).total_seconds() < SILENCE_S
