"""Mixed precision that means the same thing under FSDP1, FSDP2, DDP and one device in the HF Trainer."""

from .audit import record_precision
from .audit_callback import PrecisionAudit
from .callback import FSDPAutocast
from .cpu import enable_cpu_fsdp
from .explain import explain
from .patching import is_patched, patch_model, unpatch_model
from .policy import PrecisionPolicy, resolve_policy
from .preset_table import compare_presets
from .report import PrecisionReport

__all__ = [
    "FSDPAutocast",
    "PrecisionAudit",
    "PrecisionPolicy",
    "PrecisionReport",
    "compare_presets",
    "enable_cpu_fsdp",
    "explain",
    "is_patched",
    "patch_model",
    "record_precision",
    "resolve_policy",
    "unpatch_model",
]
