"""How a distributed script ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process after its exit functions, but before C++ destroys what is left.

    With the group destroyed and its modules collected, a thread of gloo's is still there about once in 20 runs on a
    loaded machine, and C++ then aborts ("terminate called without an active exception", torch 2.14): the launcher
    would report a run that did everything as failed.
    """
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(timeout=30)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
