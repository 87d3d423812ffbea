"""Methods: losses, strategies, and the relation between samples and references that they are written on."""
