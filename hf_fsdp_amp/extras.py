"""Import what only the reports need, with one clear line where it is missing."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, what: str) -> Any:
    """The module of that name.

    Args:
        module: name of a module of an optional package.
        what: what needs it, for the error.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{what} needs {package}: pip install 'hf_fsdp_amp[report]'") from error
