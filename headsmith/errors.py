"""What can go wrong for a user, and the exit code that each kind of fault gets.

Every message is one sentence for a person: what is wrong, where, and what to do about it.
"""

from __future__ import annotations


class HeadsmithError(Exception):
    """A mistake in usage or configuration: one sentence on stderr, exit code 2."""

    exit_code = 2


class GateNotMet(HeadsmithError):
    """The run finished and was measured, but missed a bound that the user set."""

    exit_code = 1


class EqualityFailed(HeadsmithError):
    """Speculative output differs from the target's own output by more than numerical ties allow."""

    exit_code = 3


class EnvironmentFault(HeadsmithError):
    """The machine is at fault, not the user: no network, a full disk, a library not installed."""

    exit_code = 4
