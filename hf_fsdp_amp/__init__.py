"""Mixed precision that means the same thing under FSDP1, FSDP2, DDP and one device in the HF Trainer."""

from .callback import FSDPAutocast
from .cpu import enable_cpu_fsdp
from .patching import is_patched, patch_model, unpatch_model
from .policy import PrecisionPolicy, resolve_policy

__all__ = [
    "FSDPAutocast",
    "PrecisionPolicy",
    "enable_cpu_fsdp",
    "is_patched",
    "patch_model",
    "resolve_policy",
    "unpatch_model",
]
