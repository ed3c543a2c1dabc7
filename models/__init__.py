"""Models: plain single-device Flax modules, each with its placement rules beside it."""
