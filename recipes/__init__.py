"""Training recipes, one YAML file a run; this module makes them part of the package."""
