"""What a chat model's answer is worth: the expected value over all answers it may give, from log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from digenrl.rewards.reward import RewardError

Candidates = Sequence[tuple[str, float]]
"""(text of a token, its natural log-probability) of the likeliest tokens at one place of an answer."""

YES_NO: Mapping[str, float] = {"Yes": 1.0, "yes": 1.0, "YES": 1.0, "No": 0.0, "no": 0.0, "NO": 0.0}

_LEAST_SHARE = 0.1
"""Of the first token's probability that must be on the choices; with less, the model means to say something else."""
_NEGLIGIBLE = 1e-4
"""Part of the range of values that a second question must be able to move the expected value by."""


def scale_choices(low: int, high: int) -> dict[str, float]:
    """Give the whole numbers of a scale, as answers and as values."""
    return {str(number): float(number) for number in range(low, high + 1)}


@dataclass(frozen=True)
class Beginning:
    """A first token that is a choice, and begins a longer one of another value: the "1" of "1" and "10"."""

    text: str
    share: float
    """Its probability, among the choices."""
    rest: str
    """What the longer choice goes on with."""

    def mean(self, choices: Mapping[str, float], candidates: Candidates) -> float:
        """Give the mean value of the two, from the candidates for the token that comes next.

        A rest that is not among them counts as not given.
        """
        longer = min(1.0, sum(math.exp(log_prob) for text, log_prob in candidates if text == self.rest))
        return (1 - longer) * choices[self.text] + longer * choices[self.text + self.rest]


@dataclass(frozen=True)
class Reading:
    """What the first token of an answer says."""

    value: float
    """Expected value, without what `beginning` adds."""
    beginning: Beginning | None = None
    """Two choices that the next token must tell apart."""


def read_first_token(candidates: Candidates, choices: Mapping[str, float]) -> Reading:
    """Give the expected value of an answer, sum of p(choice) value(choice), p being normalized over the choices.

    A token counts for the choice that it is or that it begins, with white space around it left out. Where it is one
    choice and begins another of another value, which is no token of its own, the next token decides; that is left open
    only if it could move the expected value by more than 1e-4 of the range of values.

    Args:
        candidates: for the answer's first token.
        choices: answers and their values; at most one is the beginning of another one with another value.

    Raises:
        RewardError: choices have less than a tenth of the probability.
    """
    found: dict[str, float] = {}
    for token, log_prob in candidates:
        text = token.strip()
        if text and any(choice.startswith(text) for choice in choices):
            found[text] = found.get(text, 0.0) + math.exp(log_prob)
    total = sum(found.values())
    if total < _LEAST_SHARE:
        raise RewardError(_no_choice(candidates, choices, total))
    value, beginning = 0.0, None
    spread = max(choices.values()) - min(choices.values())
    for text, probability in found.items():
        share = probability / total
        own = choices.get(text)
        longer = [choice for choice in choices if choice.startswith(text) and choice != text and choice not in found]
        if own is None:
            # Choices that begin alike have one value, unless they begin with a choice.
            value += share * next(number for choice, number in choices.items() if choice.startswith(text))
        elif longer and share * abs(choices[longer[0]] - own) > _NEGLIGIBLE * spread:
            assert beginning is None, "at most one choice may be the beginning of another"
            beginning = Beginning(text, share, longer[0].removeprefix(text))
        else:
            value += share * own
    return Reading(value, beginning)


def _no_choice(candidates: Candidates, choices: Mapping[str, float], total: float) -> str:
    likeliest = sorted(candidates, key=lambda candidate: -candidate[1])[:3]
    said = ", ".join(f"{token!r} ({math.exp(log_prob):.0%})" for token, log_prob in likeliest)
    return (
        f"the model's answer is none of {', '.join(choices)}: they have {total:.0%} of the first token's probability, "
        f"the likeliest are {said or 'none'}; set `structured_outputs` to true, or say in `instruction` how to answer."
    )
