"""Files of `headsmith eval` that say what a head is worth, for what is published or exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headsmith.errors import HeadsmithError

SCHEMA = "headsmith.result/1"


def read_result(path: Path, sha256: str | None) -> dict[str, Any]:
    """A result.json that measured the head whose weights hash to `sha256`; HeadsmithError for any
    other file.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HeadsmithError(f"there is no result {path}; give a file of headsmith eval") from error
    except (ValueError, OSError) as error:
        raise HeadsmithError(f"{path} is not valid JSON ({error}); measure again") from error
    if not isinstance(result, dict) or result.get("schema") != SCHEMA:
        raise HeadsmithError(
            f"{path} is not the result of headsmith eval; write one with --json FILE"
        )
    head = result.get("head") or {}
    if head.get("sha256") != sha256 or sha256 is None:
        raise HeadsmithError(
            f"{path} measured {head.get('path') or 'no head'}, whose weights are not these; "
            "measure this head with headsmith eval"
        )
    return result
