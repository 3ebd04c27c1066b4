"""Rules by name."""

from headsmith.inference.accept import GREEDY, POSTERIOR_THRESHOLD, Greedy, Rule, Sample, Typical
from headsmith.inference.ratio import Ratio
from headsmith.inference.sampling import PLAIN, Shaping


def make_rule(
    name: str,
    temperature: float = 0.0,
    *,
    seed: int = 0,
    shaping: Shaping = PLAIN,
    threshold: float = POSTERIOR_THRESHOLD,
    alpha: float | None = None,
) -> Rule:
    """The rule of that name (`greedy`, `sample`, `ratio`, `typical`). At temperature 0 all are
    greedy: one token has all the probability, and cutting off others changes nothing.
    """
    if name == "sample" and temperature > 0:
        return Sample(temperature, seed, shaping)
    if name == "ratio" and temperature > 0:
        return Ratio(temperature, seed, shaping)
    if name == "typical" and temperature > 0:
        return Typical(temperature, threshold, alpha)
    return Greedy(shaping) if shaping.adjusts else GREEDY
