"""Heads in the layouts that engines load: export, import, launch configs (spec/eagle.md 5)."""
