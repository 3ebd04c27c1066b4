"""Write the quickstart training prompts: ``python data/quickstart/make_prompts.py``.

Each file in ``bank/`` is one category. A bank is a list of blocks; a block pairs requests with the
hand-written things they ask about, and every prompt is one request filled with one item:

    == name              starts a block
    ? Tell me about {x}  a request; an item's fields, split at " | ", are {x}, {y} and {z}
    > Make it shorter.   a follow-up that suits any request of the block
    - fireflies          an item

Slots: {name} takes a word from ``bank/pools.txt`` (the same one throughout a prompt; {name2} is a
different one), {3-9} a number, {a/b} either text. An item may begin with [a=3-9 b=2-5] to fix
numbers which {a}, {a*b} and {a+b*a} then use. ``\\n`` is a line break. Items of the code bank
are literal.
"""

import json
import math
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BANK = Path(__file__).parent / "bank"
OUTPUT = Path(__file__).parent / "prompts.jsonl"
QUOTAS = {"chat": 480, "code": 300, "maths": 260, "summary": 280, "extraction": 280}
TWO_TURN_SHARE = 0.12
MAX_WORDS = 110
SEED = 20240611

_SLOT = re.compile(r"\{([^{}]+)\}")
_NUMBERS = re.compile(r"^\[((?:[a-z]=\d+-\d+ ?)+)\]\s*")


@dataclass(slots=True)
class Block:
    """Requests, and the items and follow-ups that fit all of them."""

    requests: list[str] = field(default_factory=list)
    followups: list[str] = field(default_factory=list)
    items: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Prompt:
    """One filled request and the block it came from (for its follow-ups)."""

    text: str
    block: Block


def read_blocks(path: Path) -> dict[str, Block]:
    """Parse a bank file into its blocks by name; ValueError names a line that fits no kind."""
    blocks: dict[str, Block] = {}
    current = Block()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        kind, _, text = line.partition(" ")
        if kind == "==":
            current = blocks.setdefault(text.strip(), Block())
        elif kind in ("?", ">", "-"):
            {"?": current.requests, ">": current.followups, "-": current.items}[kind].append(text)
        elif line.strip():
            raise ValueError(f"{path.name}:{number}: a line starts with '==', '?', '>' or '-'")
    return blocks


class Filler:
    """Fills the slots of one prompt; a pool word is remembered under its slot's name."""

    def __init__(self, rng: random.Random, pools: dict[str, Block]) -> None:
        self.rng = rng
        self.pools = pools
        self.bound: dict[str, str] = {}

    def fill(self, text: str) -> str:
        header = _NUMBERS.match(text)
        if header:
            for part in header[1].split():
                name, _, span = part.partition("=")
                self.bound[name] = self._number(span)
            text = text[header.end() :]
        return _SLOT.sub(lambda match: self._slot(match[1]), text)

    def _slot(self, body: str) -> str:
        if body in self.bound:
            return self.bound[body]
        if "/" in body:
            return self.rng.choice(body.split("/"))
        if re.fullmatch(r"\d+-\d+", body):
            return self._number(body)
        if re.fullmatch(r"[a-z]([*+][a-z])+", body):
            return str(sum(self._product(term) for term in body.split("+")))
        return self._pool_word(body)

    def _number(self, span: str) -> str:
        low, high = span.split("-")
        return str(self.rng.randint(int(low), int(high)))

    def _product(self, term: str) -> int:
        return math.prod(int(self.bound[name]) for name in term.split("*"))

    def _pool_word(self, slot: str) -> str:
        taken = set(self.bound.values())
        words = [word for word in self.pools[slot.rstrip("0123456789")].items if word not in taken]
        self.bound[slot] = self.rng.choice(words)
        return self.bound[slot]


def fill_prompt(request: str, item: str, literal: bool, filler: Filler) -> str:
    """The request with the item's fields in {x}, {y} and {z}; literal items keep their braces."""
    fields = item.split(" | ")
    for name, value in zip("xyz", fields, strict=False):
        filler.bound[name] = value if literal else filler.fill(value)
    text = filler.fill(request).replace("\\n", "\n")
    return text[0].upper() + text[1:]


def candidates(
    blocks: list[Block], literal: bool, rng: random.Random, pools: dict[str, Block]
) -> Iterator[Prompt]:
    """Endless rounds over all items in random order, each with a request it has not had yet."""
    pairs = [(block, item) for block in blocks for item in block.items]
    unused: dict[str, list[str]] = {}
    while True:
        rng.shuffle(pairs)
        for block, item in pairs:
            if not unused.get(item):
                unused[item] = rng.sample(block.requests, len(block.requests))
            request = unused[item].pop()
            yield Prompt(fill_prompt(request, item, literal, Filler(rng, pools)), block)


def take_distinct(source: Iterator[Prompt], count: int) -> list[Prompt]:
    """The first ``count`` prompts of at most MAX_WORDS words that differ when case-folded."""
    chosen: dict[str, Prompt] = {}
    while len(chosen) < count:
        prompt = next(source)
        if len(prompt.text.split()) <= MAX_WORDS:
            chosen.setdefault(" ".join(prompt.text.casefold().split()), prompt)
    return list(chosen.values())


def category_records(
    category: str, quota: int, rng: random.Random, pools: dict[str, Block]
) -> list[dict[str, object]]:
    """The JSON records of one category, TWO_TURN_SHARE of them with a follow-up turn."""
    blocks = list(read_blocks(BANK / f"{category}.txt").values())
    prompts = take_distinct(candidates(blocks, category == "code", rng, pools), quota)
    able = [index for index, prompt in enumerate(prompts) if prompt.block.followups]
    two_turn = set(rng.sample(able, round(quota * TWO_TURN_SHARE)))
    records: list[dict[str, object]] = []
    for index, prompt in enumerate(prompts):
        record: dict[str, object] = {"id": f"{category}-{index + 1:04d}"}
        if index in two_turn:
            record["turns"] = [prompt.text, rng.choice(prompt.block.followups)]
        else:
            record["messages"] = [{"role": "user", "content": prompt.text}]
        records.append(record)
    return records


def make_prompts(seed: int = SEED) -> str:
    """The whole file as text: all categories, shuffled so that any prefix is a fair sample."""
    rng = random.Random(seed)
    pools = read_blocks(BANK / "pools.txt")
    records: list[dict[str, object]] = []
    for category, quota in QUOTAS.items():
        records += category_records(category, quota, rng, pools)
    rng.shuffle(records)
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def main() -> None:
    """Write to the path given, or over the committed file."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    path.write_text(make_prompts(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
