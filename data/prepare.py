"""From conversations to an Arrow folder of token ids and loss masks, made once.

The folder's name carries the hash of everything that made it: the content of the source, the chat
template, the tokenizer and the limits. The same call finds it again; a changed input makes another.
Every conversation that is not used is counted under a reason.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from headsmith.data.identity import name_of, sha256, source_identity, tokenizer_sha256
from headsmith.data.mask import Masker
from headsmith.data.read import read_conversations
from headsmith.data.rows import HELD_OUT, Limits, RowWriter
from headsmith.errors import HeadsmithError
from headsmith.files import atomic_folder, write_json

SCHEMA = "headsmith.data/1"
INFO = "headsmith-data.json"


@dataclass(slots=True)
class Prepared:
    """Rows ready to train on.

    `dataset` has columns input_ids (int32) and loss_mask (int8), numpy-formatted. `counts` holds
    the conversations that are not used, by reason. `info` is the folder's headsmith-data.json:
    source, what made the hash, rows, tokens, trained_tokens, cut, read, counts, roles, warnings.
    """

    path: Path
    dataset: Any
    counts: Counter[str]
    info: dict[str, Any]
    reused: bool = False

    @property
    def fingerprint(self) -> str:
        """`sha256:` and the hash of what made the data."""
        return str(self.info["fingerprint"])

    @property
    def held_out(self) -> Path | None:
        """Prompts (JSON Lines of `messages`) of the conversations kept out; None if none were."""
        path = self.path / HELD_OUT
        return path if path.exists() else None


def prepare(
    source: str | Path,
    tokenizer: Any,
    out_root: str | Path,
    *,
    max_length: int = 2048,
    max_rows: int | None = None,
    min_trained: int = 2,
    overlong: Literal["cut", "drop"] = "cut",
    held_out: float = 0.0,
    split: str | None = None,
    revision: str | None = None,
    progress: Callable[[float | None, int], None] | None = None,
) -> Prepared:
    """Tokenise and mask a source into `out_root/NAME-HASH`, or find it there.

    Rows of token ids (`headsmith.data.token_rows`), prepared data among them, are taken as they
    are.
    Reading stops once `max_rows` rows are kept. A row longer than `max_length` tokens is cut or
    dropped (`overlong`); tokens after a row's last trained one are left off. `held_out` is the
    share of conversations, chosen by the hash of their first user message, whose prompts go to
    held-out.jsonl instead. `progress` gets (fraction read or None, rows kept).
    Raises HeadsmithError if no row is left, with the reasons.
    """
    limits = Limits(max_length, max_rows, min_trained, overlong, held_out)
    _check_tokenizer(source, tokenizer)
    conversations = read_conversations(source, split=split, revision=revision)
    masker = Masker(tokenizer)
    made_by = {
        "schema": SCHEMA,
        "source": source_identity(source, split, revision),
        "template": sha256(masker.template.source.encode()),
        "tokenizer": tokenizer_sha256(tokenizer),
        "limits": asdict(limits),
    }
    digest = sha256(json.dumps(made_by, sort_keys=True).encode())
    path = Path(out_root) / f"{name_of(source)}-{digest[:12]}"
    if found := load_prepared(path):
        return found
    writer = RowWriter(conversations, masker, limits, progress)
    with atomic_folder(path) as folder:
        writer.write(folder)
        write_json(
            folder / INFO, {"fingerprint": f"sha256:{digest}", "made_by": made_by, **writer.info()}
        )
    prepared = load_prepared(path)
    assert prepared is not None, "the folder was just written"
    prepared.reused = False
    return prepared


def _check_tokenizer(source: str | Path, tokenizer: Any) -> None:
    """HeadsmithError if the source is data that were prepared with another tokenizer."""
    before = load_prepared(Path(source).expanduser())
    if before and before.info["made_by"]["tokenizer"] != tokenizer_sha256(tokenizer):
        raise HeadsmithError(
            f"{source} was prepared with another tokenizer; prepare {before.info['origin']} for "
            "this target"
        )


def load_prepared(path: str | Path) -> Prepared | None:
    """The prepared rows in a folder; None if it holds none."""
    import datasets

    path = Path(path)
    if not (path / INFO).is_file():
        return None
    try:
        info = json.loads((path / INFO).read_text(encoding="utf-8"))
        dataset = datasets.load_from_disk(str(path)).with_format("numpy")
    except Exception as error:
        raise HeadsmithError(
            f"the prepared data in {path} cannot be read ({error}); delete the folder and run again"
        ) from error
    return Prepared(path, dataset, Counter(info["counts"]), info, reused=True)
