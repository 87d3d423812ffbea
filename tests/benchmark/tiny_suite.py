"""A small suite and its results for the tests of this folder."""

from nearkin.files import append_line

TINY = """
title = "Tiny"
source = "made up"
backbone = "conv4"
seeds = 2
baseline = "PA"
spread = "standard error"
[settings]
dim = 16
epochs = 1
batch = 24
[data.glyphs]
read = "glyphs(classes=48, samples=6)"
metrics = ["R@1", "MAP@R"]
[[row]]
name = "PA"
method = "proxy_anchor"
paper.glyphs = { "R@1" = [50.0, 0.1] }
[[row]]
name = "C2"
method = "contrastive(form=c2)"
[[row]]
name = "Oracle"
paper.glyphs = { "R@1" = 99.9, "R@1 512-d" = 99.95 }
[[row]]
name = "Later"
method = "xbm(not_there_yet(k=3), size=8)"
"""


def written(folder, text=TINY, name="tiny"):
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def append_all(path, records):
    for record in records:
        append_line(path, record)
