"""From a recipe to a checkpoint: the unroll, the losses and the training loop."""
