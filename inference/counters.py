"""`--metrics-port`: counters of the run for Prometheus, under the names that vLLM uses.

Dashboards for vLLM's speculative decoding therefore work as they are. What is counted is drafted
decoding, not the plain decoding that it is measured against:

    vllm:spec_decode_num_drafts                   passes that had drafts
    vllm:spec_decode_num_draft_tokens             drafts verified, the nodes of a tree
    vllm:spec_decode_num_accepted_tokens          drafts accepted, those behind an EOS too
    vllm:spec_decode_num_accepted_tokens_per_pos  the same by `position`, counted from 0
    vllm:prompt_tokens, vllm:generation_tokens, vllm:request_success (by `finished_reason`)

so that 1 + accepted / drafts is `equivalents.vllm` of result.json. A request counts when it is
finished; what a resumed run takes from its earlier parts counts as well. Prometheus appends
`_total` to each name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headsmith.errors import EnvironmentFault
from headsmith.inference.records import Phases, Request, Response, Round

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from headsmith.inference.speed import Generates

_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
_HELP = {
    "spec_decode_num_drafts": "Number of verification passes that had drafts.",
    "spec_decode_num_draft_tokens": "Number of draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Number of draft tokens that were accepted.",
    "prompt_tokens": "Number of prompt tokens.",
    "generation_tokens": "Number of output tokens.",
}


class Counters:
    """The counters of one run. `model` is their `model_name`."""

    def __init__(self, model: str, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter

        names = ("model_name", "engine")
        labels = {"model_name": model, "engine": "0"}
        self._labels = labels
        self._counts = {
            name: Counter(f"vllm:{name}", text, names, registry=registry).labels(**labels)
            for name, text in _HELP.items()
        }
        self._positions = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Number of draft tokens that were accepted, by draft position.",
            (*names, "position"),
            registry=registry,
        )
        self._finished = Counter(
            "vllm:request_success",
            "Number of finished requests, by what ended them.",
            (*names, "finished_reason"),
            registry=registry,
        )

    def count(self, response: Response) -> None:
        """Adds a finished request."""
        drafted = [one for one in response.passes if one.proposed]
        depth = max((one.proposed for one in drafted), default=0)
        amounts = {
            "spec_decode_num_drafts": len(drafted),
            "spec_decode_num_draft_tokens": sum(one.nodes for one in drafted),
            "spec_decode_num_accepted_tokens": sum(one.accepted for one in drafted),
            "prompt_tokens": len(response.request.prompt_ids),
            "generation_tokens": len(response.output_ids),
        }
        for name, amount in amounts.items():
            self._counts[name].inc(amount)
        for position in range(depth):
            reached = sum(one.accepted > position for one in drafted)
            self._positions.labels(**self._labels, position=str(position)).inc(reached)
        reason = _REASONS[response.finish_reason]
        self._finished.labels(**self._labels, finished_reason=reason).inc()

    def wrap(self, decoder: Generates, arm: str, batch: int) -> Generates:
        """The decoder, counted where it drafts."""
        return _Counted(decoder, self.count) if arm == "drafted" else decoder


class _Counted:
    """A decoder whose finished requests are counted."""

    def __init__(self, decoder: Generates, count: Callable[[Response], None]) -> None:
        self.decoder, self.count = decoder, count

    @property
    def rounds(self) -> list[Round]:
        """Those of the decoder."""
        return getattr(self.decoder, "rounds", [])

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None] | None = None,
    ) -> tuple[list[Response], Phases]:
        def finished(response: Response) -> None:
            self.count(response)
            if on_response is not None:
                on_response(response)

        return self.decoder.generate(requests, finished)


@contextmanager
def served(model: str, port: int) -> Iterator[Counters]:
    """Counters at http://HOST:port/metrics, on all interfaces, for as long as the block runs.

    Raises EnvironmentFault when the port cannot be had; ModuleNotFoundError without the extra
    `metrics`.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    counters = Counters(model, registry)
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as fault:
        raise EnvironmentFault(
            f"the port {port} for --metrics-port cannot be had ({fault.strerror}); name another"
        ) from fault
    try:
        yield counters
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
