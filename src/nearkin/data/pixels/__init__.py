"""From image files to batches on the device; `open` is the front door."""
