"""Search by picture: embed images, build an index, query it, and calibrate a similarity threshold."""
