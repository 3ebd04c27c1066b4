"""The table of `headsmith eval` for people; every number in it is in `result.json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headsmith.inference.advice import advice_line
from headsmith.inference.figures import (
    LOAD_COLUMNS,
    bounds,
    gigabytes,
    load_rows,
    number,
    percent,
    phase_cells,
    speed_cells,
)
from headsmith.inference.load import where_it_pays
from headsmith.inference.sampling import in_words

TAU_FORMULA = (
    "tau = committed tokens / verification passes: bonus token counted, cut at EOS, stop and "
    "limit, prefill not counted"
)
# Below these the head does nothing at all, which is wiring and not training (spec/verifier.md 6.4).
MIN_FIRST_RATE = 0.05
MIN_TAU = 1.02
WIRING = (
    "taps: the config names the layers that the head was trained on, ascending, three of them",
    "d2t: draft id + d2t[draft id] is the target id; not all zero with a smaller vocabulary",
    "norms: fc_norm, norm_output and norm_before_residual as in training, no second final norm",
    "rope: theta and scaling as in training; positions count from the prompt's first token",
    "template: the same chat template and system prompt as the training data",
    "pairing: row i takes embedding(x[i+1]) and the taps of x[i], in prefill and after acceptance",
    "checkpoint: fc reads 3 x hidden size, and these are the weights of this target",
)
MEDUSA_WIRING = (
    "state: the target's last state behind its final norm, of the last accepted token",
    "shift: head k, counted from 0, was trained on the token k + 2 places behind that state",
    "token_map: row i of a truncated lm_head is the target id token_map[i]",
    "template: the same chat template and system prompt as the training data",
    "checkpoint: these are the weights of this target, and its lm_head where that is shared",
)


def print_report(result: dict[str, Any], console: Console) -> None:
    """Prints the tables, the verdicts and the warnings of a result."""
    console.print(Text(title_of(result), style="bold"))
    console.print(_acceptance(result))
    console.print(Text(TAU_FORMULA, style="dim"))
    positions = _positions(result["overall"])
    if positions is not None:
        console.print(positions)
    console.print(_speed(result["speed"]))
    if result["setup"].get("arrival"):
        console.print(_load(result))
    for line in statements(result):
        console.print(Text(line))
    for warning in result["warnings"]:
        console.print(Text(f"warning: {warning}", style="yellow"))
    if looks_unwired(result):
        _print_wiring(console, result["head"]["kind"])


def statements(result: dict[str, Any]) -> list[str]:
    """What the figures say, in sentences: does the head pay, is the text the target's own, how
    much more would it take to know tau better, which bounds of a gate are met.
    """
    lines = [
        *_verdicts(result),
        *_load_verdicts(result["speed"]),
        _kept_to(result),
        _equivalents(result),
    ]
    lines += [advice_line(result.get("advice"))]
    for row in result.get("gate", ()):
        lines.append(f"gate {'met' if row['met'] else 'MISSED'}: {row['says']}")
    return [line for line in lines if line]


def looks_unwired(result: dict[str, Any]) -> bool:
    """True when the head's drafts are so rarely right that its wiring is the likely cause."""
    rates, tau = result["overall"]["per_position"], result["overall"]["tau"]
    if result["setup"]["drafter"] != "head" or not rates:
        return False
    return rates[0] < MIN_FIRST_RATE or tau < MIN_TAU


def open_table(title: str, *columns: str) -> Table:
    """An open table of right-aligned columns that fits 80 characters; the first is a label."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=place > 0)
    return table


def _acceptance(result: dict[str, Any]) -> Table:
    overall, drafted = result["overall"], result["setup"]["drafter"] != "none"
    columns = ["task", "re-\nquests", "tokens", "tau", "95 % interval", "tau per\nrequest"]
    if drafted:
        columns += [f"accepted\nof depth {len(overall['per_position'])}", "nothing\naccepted"]
    table = open_table("acceptance", *columns)
    rows = list(result["tasks"].items())
    if len(rows) > 1:
        rows.append(("all", overall))
    for name, metrics in rows:
        cells = [name, str(metrics["requests"]), str(metrics["tokens"]), number(metrics["tau"])]
        cells += [bounds(metrics["tau_ci"]), number(metrics["tau_macro"])]
        if drafted:
            cells += [percent(metrics["acceptance_rate"])]
            cells += [percent(metrics["zero_accept_fraction"])]
        table.add_row(*cells, style="bold" if name == "all" else None)
    return table


def _positions(metrics: dict[str, Any]) -> Table | None:
    """u and c of every draft position; None where nothing was drafted."""
    if not metrics["per_position"]:
        return None
    numbers = [str(place + 1) for place in range(len(metrics["per_position"]))]
    table = open_table("accepted at draft position", "", *numbers)
    table.add_row("u: of all passes", *map(percent, metrics["per_position"]))
    table.add_row("c: of those that came so far", *map(percent, metrics["conditional"]))
    return table


def _speed(rows: Iterable[dict[str, Any]]) -> Table:
    table = open_table(
        "speed of decoding, prefill apart; ms per pass",
        "batch",
        "plain\ntok/s",
        "drafted\ntok/s",
        "speed-\nup",
        "pre-\ndicted",
        "pays",
        "draft\nms",
        "verify\nms",
        "rest\nms",
        "peak\nGB",
    )
    for row in rows:
        table.add_row(*speed_cells(row), *phase_cells(row), gigabytes(row["peak_memory_bytes"]))
    return table


def _verdicts(result: dict[str, Any]) -> Iterable[str]:
    """The inequality that decides, with its numbers, for every batch size."""
    drafter = result["setup"]["drafter"]
    what = "the head" if drafter == "head" else drafter
    for row in result["speed"]:
        if row["pays"] is not None:
            sign, verdict = ("<", "pays") if row["pays"] else (">=", "does not pay")
            yield (
                f"batch {row['batch']}: {what} {verdict}: (draft + verify + rest) per committed "
                f"token {row['cost_per_token_ms']:.2f} ms {sign} "
                f"{row['baseline_cost_per_token_ms']:.2f} ms of plain decoding"
            )


def _load(result: dict[str, Any]) -> Table:
    """Throughput and waiting of both decoders at every concurrency."""
    title = f"load: requests arrive {result['setup']['arrival']}, all output and prefill counted"
    table = open_table(title, "batch", *LOAD_COLUMNS)
    for cells in load_rows(result["speed"]):
        table.add_row(*cells)
    return table


def _load_verdicts(speed: list[dict[str, Any]]) -> Iterable[str]:
    """Where drafting stops to pay, and how near the prediction came under load."""
    if verdict := where_it_pays(speed):
        yield verdict
    for row in speed:
        load = row.get("load")
        if load and load["plain"]:
            yield (
                f"load at {row['batch']} concurrent: {number(load['speedup'])} times plain "
                f"decoding's output, {number(load['predicted_speedup'])} predicted of full rounds; "
                f"{load['identical']} texts are the plain decoder's"
            )


def _kept_to(result: dict[str, Any]) -> str:
    """Whether the text is the target's own; for a lossy rule, how far from it."""
    if result["lossy"]:
        return _drift(result["lossy"])
    if result.get("distribution"):
        return _chance(result["distribution"])
    equality = result["equality"]
    line = (
        f"equality: {equality['checked']} output tokens checked against the target: "
        f"{equality['exact']} exact, {equality['ties']} ties, {equality['fails']} fails"
    )
    if equality["compared_to_baseline"]:
        line += (
            f"; {equality['identical_to_baseline']} of {equality['compared_to_baseline']} outputs "
            "are the plain decoder's token for token"
        )
    return line


def _chance(drawn: dict[str, Any]) -> str:
    """For a rule that keeps the distribution and not the text."""
    return (
        f"distribution: {drawn['tokens']} output tokens checked against the target: "
        f"{drawn['impossible']} that it could not draw; mean log-likelihood "
        f"{number(drawn['log_likelihood'])} nats a token, {number(drawn['expected'])} expected "
        f"of its own draws (z {number(drawn['z'])}, within 3 of 0 but for 0.3 % of runs)"
    )


def _drift(lossy: dict[str, Any]) -> str:
    line = (
        f"LOSSY ({lossy['rule']}): {percent(lossy['first_choice'])} of {lossy['tokens']} output "
        "tokens are what the target would choose there, mean log-likelihood "
        f"{number(lossy['mean_log_likelihood'])} nats a token"
    )
    if lossy["compared_to_greedy"]:
        line += (
            f" ({number(lossy['greedy_mean_log_likelihood'])} for plain greedy text); "
            f"{lossy['identical_to_greedy']} of {lossy['compared_to_greedy']} outputs are the "
            f"greedy ones, {percent(lossy['same_as_greedy_until'])} of the tokens before the "
            "first difference"
        )
    return line


def _equivalents(result: dict[str, Any]) -> str:
    if result["setup"]["drafter"] == "none":
        return ""
    given = result["equivalents"]
    return "the same passes as others count them: " + ", ".join(
        f"{name} {number(given[key])}"
        for name, key in (
            ("vLLM", "vllm"),
            ("SGLang", "sglang"),
            ("EAGLE", "eagle"),
            ("Spec-Bench", "spec_bench"),
        )
    )


def _print_wiring(console: Console, kind: str) -> None:
    console.print(
        Text(
            "The drafts are almost never right. That is a fault of the wiring more often than of "
            "the training; check:",
            style="bold yellow",
        )
    )
    for line in MEDUSA_WIRING if kind == "medusa" else WIRING:
        console.print(Text(f"  - {line}"))


def title_of(result: dict[str, Any]) -> str:
    """What was measured, on what."""
    setup = result["setup"]
    what = f"{result['target']['path']}, {result['target']['dtype']}, {result['device']['name']}"
    if result["head"]:
        head = result["head"]
        return f"{head['path']} ({head['kind']}, {setup['draft']}{_rule(setup)}) on {what}"
    if setup["drafter"] != "none":
        draft = f", {setup['draft']}" if setup["draft"] else ""
        return f"{setup['drafter']}{draft}{_rule(setup)} on {what}"
    return f"plain decoding{_rule(setup)} on {what}"


def _rule(setup: dict[str, Any]) -> str:
    """The rule in a title; greedy, the default, goes without saying."""
    given = in_words(setup)
    if setup["rule"] == "greedy":
        return "".join(f", {one}" for one in given)
    lossy = [] if setup["lossless"] else ["lossy"]
    return ", " + ", ".join(
        [f"{setup['rule']} at temperature {setup['temperature']:g}", *given, *lossy]
    )
