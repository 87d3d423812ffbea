"""Tables and pictures that a paper shows of a run: uncertainty, proxies, outliers, geometry, digits."""
