"""`headsmith doctor`: what is wrong with a head, before anything runs."""
