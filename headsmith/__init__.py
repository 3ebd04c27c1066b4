"""headsmith trains draft heads for speculative decoding and proves what they are worth.

The public names below are loaded on first use, so that `import headsmith` (and with it the
command line) does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from headsmith.errors import HeadsmithError

if TYPE_CHECKING:
    from headsmith.inference.engine import Decoder
    from headsmith.models.eagle3 import Eagle3Head
    from headsmith.models.medusa import MedusaHead
    from headsmith.models.target import Target

__version__ = "0.1.0"
__all__ = ["Decoder", "Eagle3Head", "HeadsmithError", "MedusaHead", "Target", "__version__"]

_LAZY = {
    "Decoder": "headsmith.inference.engine",
    "Eagle3Head": "headsmith.models.eagle3",
    "MedusaHead": "headsmith.models.medusa",
    "Target": "headsmith.models.target",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'headsmith' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
