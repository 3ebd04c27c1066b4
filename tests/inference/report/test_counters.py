"""Prometheus counters: vLLM's names, and sums that agree with what result.json says."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headsmith.cli import cli, run
from headsmith.errors import EnvironmentFault
from headsmith.inference.metrics import equivalents
from headsmith.inference.records import Pass, Phases, Request, Response

pytest.importorskip(
    "prometheus_client", reason="prometheus-client is not installed: pip install headsmith[metrics]"
)
from headsmith.inference.counters import served  # noqa: E402


def response(id: str, accepted: list[int], finish: Any = "length") -> Response:
    """Passes of a tree of depth 3 and 7 nodes, and one at the end that had no drafts."""
    passes = [*(Pass(3, a, a + 1, 7) for a in accepted), Pass(0, 0, 1, 0)]
    ids = list(range(1 + sum(one.committed for one in passes)))
    return Response(Request(id, "chat", [1] * 5), ids, finish, passes, 0.1, 0.2, [0.1])


class Answers:
    """A decoder that gives these responses."""

    def __init__(self, responses: list[Response]) -> None:
        self.responses = responses

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None] | None = None,
    ) -> tuple[list[Response], Phases]:
        for one in self.responses:
            assert on_response is not None
            on_response(one)
        return self.responses, Phases()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def scraped(port: int) -> dict[str, float]:
    """Every sample of vLLM's names that is served, by its name with labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line.startswith("vllm:"))
    return {name: float(value) for name, _, value in pairs if "_created" not in name}


def test_names_labels_and_sums() -> None:
    responses = [response("a", [3, 0, 1], "eos"), response("b", [2]), response("c", [], "context")]
    port = free_port()
    seen: list[str] = []
    with served("a/head", port) as counters:
        decoder = Answers(responses)
        assert counters.wrap(decoder, "plain", 1) is decoder, "plain decoding is not counted"
        made, _ = counters.wrap(decoder, "drafted", 1).generate(
            [], lambda one: seen.append(one.request.id)
        )
        found = scraped(port)
    assert made == responses and seen == ["a", "b", "c"]
    labels = 'engine="0",model_name="a/head"'
    assert found == {
        f"vllm:spec_decode_num_drafts_total{{{labels}}}": 4,
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}}": 28,
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}}": 6,
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}}': 3,
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}}': 2,
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="2"}}': 1,
        f"vllm:prompt_tokens_total{{{labels}}}": 15,
        f"vllm:generation_tokens_total{{{labels}}}": sum(len(r.output_ids) for r in responses),
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="a/head"}': 1,
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="a/head"}': 2,
    }
    assert equivalents(responses)["vllm"] == 1 + 6 / 4
    with pytest.raises(OSError):
        scraped(port)


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"the port {port} for --metrics-port"):
            with served("m", port):
                pass


@pytest.mark.slow
def test_a_run_is_served_while_it_lasts(
    tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headsmith.inference.counters import Counters

    (tmp_path / "p.jsonl").write_text('{"prompt": "red"}\n{"prompt": "tea"}\n')
    port, pages = free_port(), []
    count = Counters.count

    def look(self: Counters, one: Response) -> None:
        count(self, one)
        pages.append(scraped(port))

    monkeypatch.setattr(Counters, "count", look)
    options = [f"--target={tiny_target_dir}", f"--prompts={tmp_path / 'p.jsonl'}", "--device=cpu"]
    args = ["eval", "--drafter=none", "--max-new-tokens=4", *options, f"--metrics-port={port}"]
    assert run(cli, args) == 0
    tokens = [sum(v for k, v in page.items() if "generation_tokens" in k) for page in pages]
    assert tokens == sorted(tokens) and len(tokens) == 2 and 2 <= tokens[-1] <= 8
