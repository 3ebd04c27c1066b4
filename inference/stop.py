"""Where an answer ends: every committed token is looked at, in order, whatever pass it came from
(spec/verifier.md 3.5).
"""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from headsmith.inference.records import FinishReason


@dataclass(frozen=True)
class StopRule:
    """End-of-sequence ids, stop strings, a limit of new tokens and one of the context (prompt +
    output).
    """

    stop_ids: frozenset[int]
    max_new_tokens: int
    max_context: int
    stop_strings: tuple[str, ...] = ()
    tokenizer: PreTrainedTokenizerBase | None = None

    def append(
        self, prompt_tokens: int, output: list[int], new: list[int]
    ) -> tuple[int, FinishReason | None]:
        """Append `new` tokens to `output` up to the first that ends the answer.

        Returns how many were appended and why the answer ended, or None. The token that ends it is
        kept; a stop id before a stop string before the limits, when one token meets several.
        """
        for count, token in enumerate(new, start=1):
            output.append(token)
            reason = self._reason(prompt_tokens, output)
            if reason is not None:
                return count, reason
        return len(new), None

    def _reason(self, prompt_tokens: int, output: list[int]) -> FinishReason | None:
        if output[-1] in self.stop_ids:
            return "eos"
        if self.stop_strings and self._holds_stop_string(output):
            return "stop"
        if len(output) >= self.max_new_tokens:
            return "length"
        if prompt_tokens + len(output) >= self.max_context:
            return "context"
        return None

    def _holds_stop_string(self, output: list[int]) -> bool:
        assert self.tokenizer is not None
        # The whole output, not its tail: a token's text may depend on the ones before it.
        text = str(self.tokenizer.decode(output))
        return any(stop in text for stop in self.stop_strings)
