"""Rounds that stay on the device (spec/verifier.md 4.2): lengths, trees and what was accepted lie
at fixed addresses, drafting and verification are one call each, captured as CUDA graphs where there
is a GPU, and the host reads one small record a round.

    state.py     what a round reads and leaves behind
    drafting.py  drafters that propose from it
    rounds.py    drafting and verification of a bucket of requests
    replay.py    CUDA graphs
"""
