"""Networks that embed images: backbones, pooling and head, and their weights."""
