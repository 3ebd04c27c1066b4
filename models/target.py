"""The frozen target: loaded once, checked against itself, read through taps.

A target is reached through transformers' own interfaces (its decoder, its input embeddings, its
output head), never by tensor names, and attends by `headsmith.models.attention`, so that packed
documents, ragged requests and draft trees need no padding. Taps are numbered as in spec/eagle.md
1.1: tap i is the residual stream before block i, 0..L.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from headsmith.errors import HeadsmithError
from headsmith.models import attention, identity, loading
from headsmith.models.linear import at_least_float32, pack_linears
from headsmith.models.prefix import Features, Prefix, behind, join
from headsmith.models.spans import KeyValueStore, Span, positions_of
from headsmith.models.tapping import tapping
from headsmith.models.target_check import check_target

if TYPE_CHECKING:
    from headsmith.models.sharded import Shares


@dataclass
class Target:
    """A frozen causal language model, its tokenizer, and where they came from.

    One that is not `whole` was loaded without its blocks: it embeds and makes logits, and what runs
    it fails. One with `shares` has its blocks in shares over several processes
    (models/sharded.py), each of which calls `settle` after the passes that it has.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: str = ""
    revision: str | None = None
    whole: bool = True
    shares: "Shares | None" = None
    head_weight: Tensor = field(init=False, repr=False)
    _prefix: Prefix | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        attention.attach(self.model, self.path)
        output = self.model.get_output_embeddings()
        if output is None:
            raise HeadsmithError(
                f"{self.path}: this model has no output head; give a causal language model"
            )
        self.head_weight = output.weight.detach()
        if self.whole:
            self._blocks = loading.find_blocks(self.decoder, self.num_layers)
            self.check()
            if self.shares is None:
                pack_linears(self.model)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        revision: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        blocks: bool = True,
        sharded: bool = False,
    ) -> "Target":
        """Load a local folder, a GGUF file, the embedded default's name, or a Hub id, and check it.
        `blocks` False leaves them out where the architecture allows that; `sharded` lays them in
        shares over the processes of this machine, all of which must call this.

        Raises HeadsmithError when there is no model there, or when the target's own head on its own
        last state does not reproduce its logits.
        """
        found = None if blocks else loading.load_ends(str(path), revision, dtype)
        if sharded and found is None:
            from headsmith.models.sharded import load_sharded

            place = torch.device(device)
            model, tokenizer, shares = load_sharded(str(path), revision, dtype, place)
            return cls(model, tokenizer, str(path), revision, shares=shares)
        model, tokenizer = found or loading.load_model(str(path), revision, dtype)
        return cls(model.to(device), tokenizer, str(path), revision, whole=found is None)

    @property
    def config(self) -> PretrainedConfig:
        """The text model's config."""
        return self.model.config.get_text_config()

    @property
    def decoder(self) -> nn.Module:
        """The model without its output head."""
        return self.model.get_decoder()

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        return self.head_weight.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.head_weight.shape[0]

    @property
    def max_context(self) -> int:
        """Positions that the target was made for."""
        return int(getattr(self.config, "max_position_embeddings", 0) or 2**30)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, as `generate` reads them: generation config, else config, else
        tokenizer.
        """
        found: Any = None
        for source in (getattr(self.model, "generation_config", None), self.config, self.tokenizer):
            found = getattr(source, "eos_token_id", None)
            if found is not None:
                break
        ids = [] if found is None else found if isinstance(found, list) else [found]
        return tuple(sorted({int(i) for i in ids}))

    @cached_property
    def always_drafted(self) -> tuple[int, ...]:
        """Ids that belong in every draft vocabulary: the stop ids and what the chat template puts
        after an answer.
        """
        ids = {*self.stop_ids, *loading.end_of_turn_ids(self.tokenizer)}
        return tuple(sorted(i for i in ids if 0 <= i < self.vocab_size))

    def default_taps(self) -> tuple[int, ...]:
        """(2, L // 2, L - 3): what every engine takes when a head names no taps (spec/eagle.md
        1.1).
        """
        taps = tuple(sorted({2, self.num_layers // 2, self.num_layers - 3}))
        if len(taps) < 3 or taps[0] < 0:
            raise HeadsmithError(
                f"{self.path}: a target of {self.num_layers} blocks has no three default taps; "
                "name them (head.taps)"
            )
        return taps

    @torch.no_grad()
    def last_norm(self) -> Tensor | None:
        """What the norm behind the last block multiplies each channel by, [H]; None for a decoder
        that has none of its own.
        """
        norm = self._final_norm
        if norm is None:
            return None
        # Asked instead of read: some families store what is added to one, some subtract a mean.
        signs = torch.ones(self.hidden_size, dtype=self.dtype, device=self.device)
        signs[1::2] = -1
        return (norm(signs[None])[0] - norm(-signs[None])[0]) / 2 * signs

    def final_norm(self, stream: Tensor) -> Tensor:
        """Last states [n, H] from the residual stream behind the last block [n, H], tap L."""
        norm = self._final_norm
        if norm is None:
            raise HeadsmithError(
                f"{self.path}: its decoder has no norm of its own behind the last block; capture "
                "its features with --backend transformers"
            )
        return norm(stream)

    @property
    def _final_norm(self) -> nn.Module | None:
        size = (self.hidden_size,)
        found = [m for m in self.decoder.children() if {p.shape for p in m.parameters()} == {size}]
        return found[-1] if found else None

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings of ids [n] -> [n, H]."""
        return self.model.get_input_embeddings()(ids)

    def logits(self, last: Tensor) -> Tensor:
        """Logits of post-norm last states [n, H] -> float32 [n, V], by the target's own head."""
        return self.after_head(at_least_float32(self.model.get_output_embeddings()(last)))

    def logits_of(self, last: Tensor, ids: Tensor | slice) -> Tensor:
        """Logits of some ids only, with gradient: last [n, H], ids [m] -> float32 [n, m]."""
        return self.after_head(at_least_float32(last @ self.head_weight[ids].T), ids)

    def after_head(self, logits: Tensor, ids: Tensor | slice | None = None) -> Tensor:
        """Bias of `ids`, scale and soft cap that some families apply behind the output matrix."""
        output, config = self.model.get_output_embeddings(), self.config
        if ids is not None and getattr(output, "bias", None) is not None:
            logits = logits + output.bias[ids]
        if getattr(config, "logit_scale", None) is not None:
            logits = logits * config.logit_scale
        if getattr(config, "logits_scaling", None) is not None:
            logits = logits / config.logits_scaling
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.inference_mode()
    def run(
        self,
        ids: Tensor,
        spans: Sequence[Span],
        cache: KeyValueStore | None = None,
        taps: Sequence[int] = (),
    ) -> Features:
        """One pass over the new tokens ids [T] of ragged requests; see `Span`. Without the output
        head.
        """
        assert self.whole, "a target without its blocks computes no states"
        if self.shares is not None:
            self.shares.join(True)
        return self._pass(ids, positions_of(spans, ids.device), spans, cache, taps)

    @torch.inference_mode()
    def run_at(
        self, ids: Tensor, positions: Tensor, cache: KeyValueStore, taps: Sequence[int] = ()
    ) -> Features:
        """One pass over tokens ids [T] at positions int64 [T]; the cache knows their places."""
        assert self.whole and self.shares is None, "one process with all blocks"
        return self._pass(ids, positions, (), cache, taps)

    def settle(self) -> None:
        """Of a target in shares: run along with the other processes until none has a pass left."""
        while self.shares is not None and self.shares.join(False):
            with torch.inference_mode():
                one = torch.zeros(1, dtype=torch.int64, device=self.device)
                self._pass(one, one, [Span(1)], None, ())

    def _pass(
        self,
        ids: Tensor,
        positions: Tensor,
        spans: Sequence[Span],
        cache: KeyValueStore | None,
        taps: Sequence[int],
    ) -> Features:
        with attention.attending(spans, cache), tapping(self._blocks, taps, self.path) as seen:
            where = {"input_ids": ids[None], "position_ids": positions[None]}
            last = self.decoder(**where, use_cache=False).last_hidden_state[0]
        return Features(
            torch.stack([seen[i] for i in taps], 1) if taps else last[:, None][:, :0], last
        )

    def features(
        self, ids: Tensor, lengths: Sequence[int], taps: Sequence[int], shared: int = 0
    ) -> Features:
        """Taps and last states of a packed row: ids [T], document lengths that sum to T.

        The first `shared` tokens of all documents must be the same; the target runs over them once.
        """
        if shared == 0:
            return self.run(ids, [Span(n) for n in lengths], taps=taps)
        wanted = (tuple(ids[:shared].tolist()), tuple(taps))
        if self._prefix is None or self._prefix.wanted != wanted:
            self._prefix = Prefix(wanted)
            self._prefix.states = self.run(ids[:shared], [Span(shared)], self._prefix, taps)
        own = self.run(
            behind(ids, lengths, shared),
            [Span(n - shared, start=shared) for n in lengths],
            self._prefix,
            taps,
        )
        joined = partial(join, lengths=lengths, shared=shared)
        return Features(
            joined(self._prefix.states.taps, own.taps), joined(self._prefix.states.last, own.last)
        )

    def check(self) -> None:
        """The target must agree with itself, or HeadsmithError says what differs."""
        check_target(self)

    @cached_property
    def _fingerprint(self) -> str:
        matrices = (self.model.get_input_embeddings().weight, self.head_weight)
        return identity.fingerprint(self.config, self.tokenizer, matrices)

    def fingerprint(self) -> str:
        """Who this target is: sha256 over config, tokenizer, template, embedding, output head."""
        return self._fingerprint
