"""The speculative decoder that proves a head: drafting, verification and measurement."""
