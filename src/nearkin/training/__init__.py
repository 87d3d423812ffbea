"""Training: the plan of a run, its loop and folder, the model it leaves, and measuring that model."""
